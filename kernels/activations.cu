// float32 rows to integers without a transform: plain, after SwiGLU, or after RMSNorm with a residual added (QuaRot
// Sec. 4).
//
// One block holds one row in registers, eight consecutive values to a vector: memory is read once and written once.
// Codes are those of an IEEE division by the scale, so they equal the torch reference's wherever its inputs do. 16-bit
// rows go to activations_16.cu. Architectures: sm_80 and newer.
#include "values/element.cuh"
#include "values/reduce.cuh"
#include "activations/rows.cuh"

template <Kind What>
__device__ __forceinline__ void load_values(const Problem& p, long long row, int at, float (&v)[8]) {
    const float* x = static_cast<const float*>(p.x);
    float other[8];
    if constexpr (What == kGated) {
        load_8(x + 2 * row * p.n + at, v);
        load_8(x + (2 * row + 1) * p.n + at, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = gated<float>(v[i], other[i]);
        return;
    }
    load_8(x + row * p.n + at, v);
    if constexpr (What == kSumNorm) {
        load_8(static_cast<const float*>(p.residual) + row * p.n + at, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] += other[i];
        store_8(static_cast<float*>(p.hidden) + row * p.n + at, v);
    }
}

// Values of this thread divided by the root mean square of the row, then times the weight.
template <int Vectors>
__device__ __forceinline__ void normalize(const Problem& p, float (&v)[Vectors][8], float* scratch) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < Vectors * 8; ++i) squares = fmaf(v[i / 8][i % 8], v[i / 8][i % 8], squares);
    const float factor = rsqrtf(block_sum(squares, scratch) / static_cast<float>(p.n) + p.eps);
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        const int at = 8 * (j * blockDim.x + threadIdx.x);
        float w[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
        if (p.weight && at < p.n) load_8(static_cast<const float*>(p.weight) + at, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[j][i] = w[i] * (v[j][i] * factor);
    }
}

// The block's threads, a multiple of 32, times Vectors * 8 cover the columns.
template <Kind What, Output Out, int Vectors>
__global__ void __launch_bounds__(1024) quantize_rows_32(const Problem p) {
    ptx::follow_previous_launch();
    __shared__ float scratch[2][32];
    const long long row = blockIdx.x;
    float v[Vectors][8] = {};
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        const int at = 8 * (j * blockDim.x + threadIdx.x);
        if (at < p.n) load_values<What>(p, row, at, v[j]);
    }
    if constexpr (What == kNorm || What == kSumNorm) normalize<Vectors>(p, v, scratch[0]);

    float scale;
    if (p.codes.static_scale) {
        scale = *p.codes.static_scale;
    } else {
        float maximum = 0.0f;
#pragma unroll
        for (int i = 0; i < Vectors * 8; ++i) maximum = fmaxf(maximum, fabsf(v[i / 8][i % 8]));
        scale = dynamic_scale(block_maximum(maximum, scratch[1]), p.codes);
    }
    if (threadIdx.x == 0 && (row == 0 || !p.codes.static_scale)) p.codes.scale[row] = scale;

    const float reciprocal = __frcp_rn(scale);
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
        const int at = 8 * (j * blockDim.x + threadIdx.x);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[j][i] = quotient(v[j][i], scale, reciprocal);
        const uint2 codes = codes_of(v[j], p.codes.largest);
        write_codes<Out>(p.codes, row * p.columns + at, codes, 2, at < p.columns);
    }
}

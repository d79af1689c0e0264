// Rows become float8 e4m3 codes with one scale each, in the pass that makes them: as they are, after SwiGLU, or after
// residual add and RMSNorm; and a product of such codes gets its scales. For SpinQuant Table 14, in bfloat16, the only result of torch's products with a scale for
// each row. All are bound by memory; arithmetic is float32. Before sm_89, which brought the instruction, CUDA's header
// converts in software.

#include <cuda_fp8.h>

#include "element.cuh"
#include "reduce.cuh"

namespace {

using bf16 = __nv_bfloat16;

// Vectors of eight that a thread holds at most.
constexpr int VECTORS = 4;
constexpr float LARGEST_CODE = 448.f;
// Of a row's largest magnitude: a row of zeros keeps a scale above zero.
constexpr float TINY = 1e-12f;

using Values = float[VECTORS][8];

__device__ __forceinline__ int column_of(int vector) { return 8 * (threadIdx.x + vector * blockDim.x); }

__device__ __forceinline__ float magnitude(const float (&x)[8]) {
    float most = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(x[j]));
    return most;
}

__device__ __forceinline__ void store_codes(unsigned char* to, const float (&x)[8], float factor) {
    unsigned words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float2 pair = {x[j] * factor, x[j + 1] * factor};
        words[j / 4] |= static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3))
                        << (j % 4 * 8);
    }
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
}

// Codes of factor * v, whose largest magnitude over the row is `most`, and the scale that turns them back.
__device__ __forceinline__ void store_row(const Values& v, float factor, float most, int n, unsigned char* codes,
                                          float* scale) {
    const float step = fmaxf(most, TINY) / LARGEST_CODE;
    if (threadIdx.x == 0) *scale = step;
    const float inverse = 1.f / step;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (column_of(i) >= n) continue;
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = v[i][j] * factor;
        store_codes(codes + column_of(i), x, inverse);
    }
}

}  // namespace

// A block per row of n values, n <= 32 * blockDim.x and a multiple of eight. x: [rows, n], or with Gated
// (gate | up) [rows, 2n], of which silu(gate) * up is quantized. codes: [rows, n]; scale: [rows].
template <bool Gated>
__global__ void __launch_bounds__(1024) quantize_fp8(const bf16* x, int n, unsigned char* codes, float* scale) {
    __shared__ float scratch[32];
    const bf16* row = x + static_cast<long long>(blockIdx.x) * n * (Gated ? 2 : 1);
    Values v;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (column_of(i) >= n) continue;
        load_8(row + column_of(i), v[i]);
        if constexpr (Gated) {
            float up[8];
            load_8(row + n + column_of(i), up);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = gated<bf16>(v[i][j], up[j]);
        }
        most = fmaxf(most, magnitude(v[i]));
    }
    most = block_maximum(most, scratch);
    store_row(v, 1.f, most, n, codes + static_cast<long long>(blockIdx.x) * n, scale + blockIdx.x);
}

// The same of RMSNorm(sum) without a gain; sum = x + residual, rounded to bfloat16, or x where there is no residual.
__global__ void __launch_bounds__(1024)
    rms_norm_quantize_fp8(const bf16* x, const bf16* residual, float eps, int n, bf16* sum, unsigned char* codes, float* scale) {
    __shared__ float scratch[2][32];
    const long long row = static_cast<long long>(blockIdx.x) * n;
    Values v;
    float most = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        if (column_of(i) >= n) continue;
        load_8(x + row + column_of(i), v[i]);
        if (residual) {
            float y[8];
            load_8(residual + row + column_of(i), y);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[i][j] = rounded<bf16>(v[i][j] + y[j]);
            store_8(sum + row + column_of(i), v[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(v[i][j], v[i][j], squares);
        most = fmaxf(most, magnitude(v[i]));
    }
    const float factor = rsqrtf(block_sum(squares, scratch[0]) / n + eps);
    most = block_maximum(most, scratch[1]) * factor;
    store_row(v, factor, most, n, codes + row, scale + blockIdx.x);
}

// out [rows, n] = row_scale x [rows, n] column_scale; n a multiple of four. A block of the grid's y is a row.
__global__ void __launch_bounds__(256)
    scale_product(const float* x, const float* row_scale, const float* column_scale, int n, bf16* out) {
    const int column = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= n) return;
    const long long place = static_cast<long long>(blockIdx.y) * n + column;
    const float4 v = *reinterpret_cast<const float4*>(x + place);
    const float4 c = *reinterpret_cast<const float4*>(column_scale + column);
    const float r = row_scale[blockIdx.y];
    using F = Float16<bf16>;
    *reinterpret_cast<uint2*>(out + place) = {F::pack(v.x * r * c.x, v.y * r * c.y),
                                                F::pack(v.z * r * c.z, v.w * r * c.w)};
}

// Rows become float8 e4m3 codes with one scale each, in the pass that makes them: as they are, after SwiGLU, or after
// residual add and RMSNorm; and a product of such codes gets its scales. For SpinQuant Table 14, in bfloat16, the only
// result of torch's products with a scale for each row. All are bound by memory; arithmetic is float32. Before sm_89,
// which brought the instruction, CUDA's header converts in software.

#include <cuda_fp8.h>

#include "values/element.cuh"
#include "values/reduce.cuh"

namespace {

using Bfloat16 = __nv_bfloat16;
using Pair = Float16<Bfloat16>;

constexpr float kLargestCode = 448.f;
// Of a row's largest magnitude: a row of zeros keeps a scale above zero.
constexpr float kTiny = 1e-12f;

// Vectors of eight values that a thread holds at most. They are held as the 16-bit pairs that they are: half the
// registers let a multiprocessor read one row while it writes another.
constexpr int kVectors = 4;
struct Held {
    uint4 vectors[kVectors];
};

constexpr int kScaled = 4;  // values that a thread of scale_product takes

__device__ __forceinline__ int column_of(int vector) { return 8 * (threadIdx.x + vector * blockDim.x); }

__device__ __forceinline__ uint4 load_pairs(const Bfloat16* from) {
    return __ldg(reinterpret_cast<const uint4*>(from));
}

__device__ __forceinline__ u32 sum_pair(u32 a, u32 b) {
    const float2 x = Pair::unpack(a), y = Pair::unpack(b);
    return Pair::pack(x.x + y.x, x.y + y.y);
}

__device__ __forceinline__ u32 code_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
}

// Codes of the row times `factor`, whose largest magnitude is then `most`, and the scale that turns them back.
__device__ __forceinline__ void store_row(const Held& held, float factor, float most, int n, unsigned char* codes,
                                          float* scale) {
    const float step = fmaxf(most, kTiny) / kLargestCode;
    if (threadIdx.x == 0) *scale = step;
    const float inverse = 1.f / step;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (column_of(i) >= n) continue;
        float x[8];
        unpack_8<Bfloat16>(held.vectors[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = x[j] * factor * inverse;
        *reinterpret_cast<uint2*>(codes + column_of(i)) = {code_pair(x[0], x[1]) | code_pair(x[2], x[3]) << 16,
                                                           code_pair(x[4], x[5]) | code_pair(x[6], x[7]) << 16};
    }
}

}  // namespace

// A block per row of n values, n <= 32 * blockDim.x and a multiple of eight. x: [rows, n], or with Gated
// (gate | up) [rows, 2n], of which silu(gate) * up is quantized. codes: [rows, n]; scale: [rows].
template <bool Gated>
__global__ void __launch_bounds__(1024, 2) quantize_fp8(const Bfloat16* x, int n, unsigned char* codes, float* scale) {
    __shared__ float scratch[32];
    const Bfloat16* row = x + static_cast<long long>(blockIdx.x) * n * (Gated ? 2 : 1);
    Held held;
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
        if (column_of(i) < n) held.vectors[i] = load_pairs(row + column_of(i));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (column_of(i) >= n) continue;
        if constexpr (Gated)
            held.vectors[i] = each_word(held.vectors[i], load_pairs(row + n + column_of(i)), gated_pair<Bfloat16>);
        float v[8];
        unpack_8<Bfloat16>(held.vectors[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) most = fmaxf(most, fabsf(v[j]));
    }
    most = block_maximum(most, scratch);
    store_row(held, 1.f, most, n, codes + static_cast<long long>(blockIdx.x) * n, scale + blockIdx.x);
}

// The same of RMSNorm(sum) without a gain; sum = x + residual, rounded to bfloat16, or x where there is no residual.
__global__ void __launch_bounds__(1024, 2)
    rms_norm_quantize_fp8(const Bfloat16* x, const Bfloat16* residual, float eps, int n, Bfloat16* sum,
                          unsigned char* codes, float* scale) {
    __shared__ float scratch[2][32];
    const long long row = static_cast<long long>(blockIdx.x) * n;
    Held held;
    float most = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
        if (column_of(i) < n) held.vectors[i] = load_pairs(x + row + column_of(i));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (column_of(i) >= n) continue;
        if (residual) {
            held.vectors[i] = each_word(held.vectors[i], load_pairs(residual + row + column_of(i)), sum_pair);
            *reinterpret_cast<uint4*>(sum + row + column_of(i)) = held.vectors[i];
        }
        float v[8];
        unpack_8<Bfloat16>(held.vectors[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            squares = fmaf(v[j], v[j], squares);
            most = fmaxf(most, fabsf(v[j]));
        }
    }
    const float factor = rsqrtf(block_sum(squares, scratch[0]) / n + eps);
    most = block_maximum(most, scratch[1]) * factor;
    store_row(held, factor, most, n, codes + row, scale + blockIdx.x);
}

// out [rows, n] = row_scale x [rows, n] column_scale; n a multiple of four. A block of the grid's y is a row.
__global__ void __launch_bounds__(256)
    scale_product(const float* x, const float* row_scale, const float* column_scale, int n, Bfloat16* out) {
    const int column = kScaled * (blockIdx.x * blockDim.x + threadIdx.x);
    if (column >= n) return;
    const long long place = static_cast<long long>(blockIdx.y) * n + column;
    const float4 v = *reinterpret_cast<const float4*>(x + place);
    const float4 c = *reinterpret_cast<const float4*>(column_scale + column);
    const float r = row_scale[blockIdx.y];
    *reinterpret_cast<uint2*>(out + place) = {Pair::pack(v.x * r * c.x, v.y * r * c.y),
                                              Pair::pack(v.z * r * c.z, v.w * r * c.w)};
}

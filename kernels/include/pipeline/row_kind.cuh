// What becomes of a row of 16-bit values on its way in: SwiGLU and RMSNorm, rounded as a model computes them.
#pragma once

#include "values/pairs.cuh"

// How rows arise: as they are, as silu(gate) * up, as the RMSNorm of x, or as that of x + residual.
enum Kind : int { kPlain, kGated, kNorm, kSumNorm };

// Of kernels that norm a row; unused by others.
struct RowNorm {
    const void* weight;  // [n] in the type of x, or null
    float eps;
};

// The sum of eight squares, added to `sum`.
template <class T>
__device__ __forceinline__ float add_squares(const uint4& x, float sum) {
    float v[8];
    unpack_8<T>(x, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
    return sum;
}

// 1 / root mean square of `n` values.
__device__ __forceinline__ float norm_factor(const RowNorm& norm, float squares, int n) {
    return rsqrtf(squares / static_cast<float>(n) + norm.eps);
}

// Eight values times the factor of their row, then times the weights from element `at` on.
template <class T>
__device__ __forceinline__ uint4 normed(const uint4& x, float factor, const RowNorm& norm, int at) {
    using F = Float16<T>;
    const auto scaled = [&](u32 word, u32) {
        const float2 pair = F::unpack(word);
        return F::pack(pair.x * factor, pair.y * factor);
    };
    const uint4 y = each_word(x, x, scaled);
    if (!norm.weight) return y;
    const uint4 weight = __ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(norm.weight) + at));
    return each_word(y, weight, multiplied<T>);
}

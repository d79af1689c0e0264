// The second half of a row's way through hadamard_strips.cu in float16 arithmetic (QuaRot Table 10): every factor's
// result is rounded. sm_80 and newer.
#pragma once

#include "hadamard/strips_shape.cuh"

// The columns of every strip in float16 arithmetic, from left products times `scale`.
template <class S>
__device__ __forceinline__ void transform_halves(HalfSums<S>& halves, const Sums<S>& sums,
                                                 const HalfRightFactor<S::kColumnOrder>& right, float scale) {
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) {
            u32(&x)[8] = halves[s][h];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float(&sum)[4] = sums[s][h / 2][i];
                x[i] = Float16<__half>::pack(sum[2 * (h % 2)] * scale, sum[2 * (h % 2) + 1] * scale);
            }
            right.apply(x);
#pragma unroll
            for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!(i & bit)) butterfly(x[i], x[i | bit]);
        }
}

// Line u of a strip, two columns to a word.
template <class S>
__device__ __forceinline__ uint4 half_line(const u32 (&halves)[S::kHalves][8], int u) {
    const u32(&x)[8] = halves[u / 2];
    const u32 order = u % 2 ? 0x7632 : 0x5410;
    return {__byte_perm(x[0], x[1], order), __byte_perm(x[2], x[3], order), __byte_perm(x[4], x[5], order),
            __byte_perm(x[6], x[7], order)};
}

// `collect` in float16: a line's eight columns are exchanged at once.
template <class S>
__device__ __forceinline__ void collect_halves(HalfValues<S>& values, const HalfSums<S>& halves, uint4* shared,
                                               int warp, int lane) {
    const int g = lane / 4, t = lane % 4, from = 8 * t + (g ^ 2 * t);
    const int to = lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2);
#pragma unroll
    for (int i = 0; i < S::kStrips * S::kLines; ++i) {
        const int s = i / S::kLines, u = i % S::kLines;
        const uint4 x = half_line<S>(halves[s], u);
        if constexpr (S::kExchange) {
            shared[(warp * S::kStrips * S::kLines + i) * 32 + from] = x;
        } else {
            u32(&v)[4] = values[u][s];
            v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        }
    }
    if constexpr (S::kExchange) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < S::kFinalLines * S::kChunks; ++i) {
            const int k = i / S::kChunks, c = i % S::kChunks, u = warp + S::kWarps * k;
            uint4 x = {0, 0, 0, 0};
            if (S::kLines % S::kWarps == 0 || u < S::kLines) x = shared[(c * S::kLines + u) * 32 + to];
            u32(&v)[4] = values[k][c];
            v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        }
    }
#pragma unroll
    for (int bit = 1; bit < S::kFinalChunks; bit *= 2)
#pragma unroll
        for (int k = 0; k < S::kFinalLines; ++k)
#pragma unroll
            for (int c = 0; c < S::kFinalChunks; ++c)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (!(c & bit)) butterfly(values[k][c][j], values[k][c | bit][j]);
}

template <class S>
__device__ __forceinline__ void widen(Values<S>& values, const HalfValues<S>& halves) {
#pragma unroll
    for (int i = 0; i < S::kFinalLines * S::kFinalChunks * 4; ++i) {
        const float2 pair = Float16<__half>::unpack((&halves[0][0][0])[i]);
        (&values[0][0][0])[2 * i] = pair.x, (&values[0][0][0])[2 * i + 1] = pair.y;
    }
}

// What a thread holds in the end, from left products; the norm is part of the first rounding.
template <class S>
__device__ __forceinline__ void finish_halves(HalfValues<S>& values, const Sums<S>& sums, const Right<S>& right,
                                              float norm, float4* shared, int warp, int lane) {
    HalfSums<S> halves;
    transform_halves<S>(halves, sums, right, 8.0f * norm);
    collect_halves<S>(values, halves, reinterpret_cast<uint4*>(shared), warp, lane);
}

// The second half of a row's way through hadamard_strips.cu in float32: the columns of each strip, rows exchanged for
// columns among the warps of a row, and the bits of the strip's number. sm_80 and newer.
#pragma once

#include "hadamard/strips_shape.cuh"

// Bits 0 and 1 of i; `norm` is applied where nothing follows, and the largest magnitude found.
template <class S>
__device__ __forceinline__ void add_columns(Sums<S>& sums, float norm, float& largest) {
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
            for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
                for (int i = 0; i < 8; ++i)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (i & bit) continue;
                        float& a = sums[s][h / 2][i][2 * (h % 2) + e];
                        float& b = sums[s][h / 2][i | bit][2 * (h % 2) + e];
                        if (S::kNormInColumns && bit == 2)
                            scaled_butterfly(a, b, norm);
                        else if (S::kLargestInColumns && bit == 2)
                            butterfly(a, b, largest);
                        else
                            butterfly(a, b);
                    }
}

// Lines of all chunks to the warps that own them: line u goes to warp u % Warps. Lanes write in the order of a product
// and read in that of memory, both without bank conflicts.
template <class S>
__device__ __forceinline__ void exchange(Values<S>& values, const Sums<S>& sums, float4* shared, int warp, int lane) {
    const int g = lane / 4, t = lane % 4, from = 8 * t + (g ^ 2 * t);
    const int to = lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2);
#pragma unroll
    for (int pass = 0; pass < S::kPasses; ++pass) {
        if (pass) __syncthreads();  // the quads before have been read
#pragma unroll
        for (int i = 0; i < S::kStrips * S::kLines * S::kQuads; ++i) {
            const int s = i / (S::kLines * S::kQuads), u = i / S::kQuads % S::kLines, q = pass + i % S::kQuads;
            const auto& x = sums[s][u / 4];
            shared[(warp * S::kStrips * S::kLines * S::kQuads + i) * 32 + from] = {
                x[4 * q][u % 4], x[4 * q + 1][u % 4], x[4 * q + 2][u % 4], x[4 * q + 3][u % 4]};
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < S::kFinalLines * S::kChunks * S::kQuads; ++i) {
            const int k = i / (S::kChunks * S::kQuads), c = i / S::kQuads % S::kChunks, q = i % S::kQuads;
            const int u = warp + S::kWarps * k;
            float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (S::kLines % S::kWarps == 0 || u < S::kLines)
                x = shared[((c * S::kLines + u) * S::kQuads + q) * 32 + to];
            float(&v)[8] = values[k][c];
            const int at = 4 * (pass + q);
            v[at] = x.x, v[at + 1] = x.y, v[at + 2] = x.z, v[at + 3] = x.w;
        }
    }
}

// What a thread holds in the end, up to the bits of the chunk's number.
template <class S>
__device__ __forceinline__ void collect(Values<S>& values, const Sums<S>& sums, float4* shared, int warp, int lane) {
    if constexpr (S::kExchange) {
        exchange<S>(values, sums, shared, warp, lane);
    } else {
#pragma unroll
        for (int u = 0; u < S::kLines; ++u)
#pragma unroll
            for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
                for (int i = 0; i < 8; ++i) values[u][s][i] = sums[s][u / 4][i][u % 4];
    }
}

// The bits of the chunk's number, then `norm` or the largest magnitude.
template <class S>
__device__ __forceinline__ void add_chunks(Values<S>& values, float norm, float& largest) {
#pragma unroll
    for (int bit = 1; bit < S::kFinalChunks; bit *= 2)
#pragma unroll
        for (int k = 0; k < S::kFinalLines; ++k)
#pragma unroll
            for (int c = 0; c < S::kFinalChunks; ++c)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (c & bit) continue;
                    const bool last = 2 * bit == S::kFinalChunks;
                    if (S::kNormInChunks && last)
                        scaled_butterfly(values[k][c][i], values[k][c | bit][i], norm);
                    else if (S::kLargestInChunks && last)
                        butterfly(values[k][c][i], values[k][c | bit][i], largest);
                    else
                        butterfly(values[k][c][i], values[k][c | bit][i]);
                }
}

template <class S>
__device__ __forceinline__ float largest_of(const Values<S>& values) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kFinalLines * S::kFinalChunks * 8; ++i)
        largest = fmaxf(largest, fabsf((&values[0][0][0])[i]));
    return largest;
}

// What a thread holds in the end, from left products; codes also need the row's largest magnitude as far as this thread
// knows it.
template <class S>
__device__ __forceinline__ void finish_row(Values<S>& values, Sums<S>& sums, const Right<S>& right, float norm,
                                           float4* shared, int warp, int lane, float& largest) {
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) right.apply(sums[s][h / 2], h % 2);
    if constexpr (S::kColumns) add_columns<S>(sums, norm, largest);
    collect<S>(values, sums, shared, warp, lane);
    if constexpr (S::kColumns) add_chunks<S>(values, norm, largest);
    if constexpr (S::kOutput != kSame && !S::kLargestInChunks && !S::kLargestInColumns) largest = largest_of<S>(values);
}

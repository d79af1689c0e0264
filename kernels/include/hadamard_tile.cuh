// A 16 x 64 tile of a row seen as a matrix, in the registers of a warp: the left factor of the Hadamard matrix from its
// signs, and of the right factor what tensor cores do. sm_80 and newer.
//
// Lanes: l = 4g + t. After the left product a thread holds rows g, g + 8 of the tile and columns 8 (2t + e) + i; after
// the right one rows 8h + 2t + e and columns 8g + i, i = 0..7, as element [i][2h + e].
#pragma once

#include "hadamard_mma.cuh"

constexpr int kChunk = 64;  // columns of a tile: eight products of eight
constexpr int kTile = 16;   // rows of a tile

__device__ __forceinline__ unsigned from_lane(unsigned x, int source) {
    return __shfl_sync(0xFFFFFFFFu, x, source);
}

// x, of which the compiler may not keep anything computed from it in registers across a loop.
__device__ __forceinline__ unsigned recomputed(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What lane 4g + t holds to lane 8t + g, so that eight consecutive lanes write one line of memory.
__device__ __forceinline__ uint2 in_memory_order(uint2 x, int lane) {
    const int source = lane % 8 * 4 + lane / 8;
    return {from_lane(x.x, source), from_lane(x.y, source)};
}

__device__ __forceinline__ uint4 in_memory_order(uint4 x, int lane) {
    const int source = lane % 8 * 4 + lane / 8;
    return {from_lane(x.x, source), from_lane(x.y, source), from_lane(x.z, source), from_lane(x.w, source)};
}

// The 16 x 16 tile of the left factor at position `k` of four that share a word of signs.
__device__ __forceinline__ Signs left_operand(unsigned word, int k, const Signs& ones) {
    Signs a;
#pragma unroll
    for (int r = 0; r < 4; ++r) a.r[r] = ((word << (4 * k + r)) & 0x80008000u) ^ ones.r[r];
    return a;
}

// Ones of a tile, zeros outside the diagonal blocks of `size` rows.
template <class T>
__device__ __forceinline__ Signs block_ones(int size, int g, int t) {
    Signs ones;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = g + 8 * (r & 1), column = 2 * t + 8 * (r >> 1);
        const unsigned low = row / size == column / size ? 0xFFFFu : 0u;
        const unsigned high = row / size == (column + 1) / size ? 0xFFFF0000u : 0u;
        ones.r[r] = Float16<T>::kOnes & (low | high);
    }
    return ones;
}

// The right factor's part over columns 8 G (three bits, across lanes) and bit 2 of i; without Columns the identity, which
// leaves the change of layout.
template <bool Columns>
struct RightFactor {
    float even[4], odd[4];  // left operands for columns i < 4 and i >= 4

    __device__ __forceinline__ RightFactor(int g, int t) {
        const int first = 2 * t, second = 2 * t + 1;
        const float a = Columns ? (__popc(g & first) & 1 ? -1.0f : 1.0f) : (g == first ? 1.0f : 0.0f);
        const float b = Columns ? (__popc(g & second) & 1 ? -1.0f : 1.0f) : (g == second ? 1.0f : 0.0f);
        even[0] = a, even[1] = Columns ? a : 0.0f, even[2] = b, even[3] = Columns ? b : 0.0f;
        odd[0] = Columns ? a : 0.0f, odd[1] = Columns ? -a : a, odd[2] = Columns ? b : 0.0f, odd[3] = Columns ? -b : b;
    }

    // Rows of half `h` of a tile. Every float is the sum of two tf32 numbers, up to its last two or three bits.
    __device__ __forceinline__ void apply(float (&tile)[8][4], int h) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float(&low)[4] = tile[i], (&high)[4] = tile[i + 4];
            const float x[4] = {low[2 * h], low[2 * h + 1], high[2 * h], high[2 * h + 1]};
            float head[4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < 4; ++j) head[j] = tf32_head(x[j]);
            mma_16n8k8_tf32(sum, even, x[0] - head[0], x[1] - head[1]);
            mma_16n8k8_tf32(sum, odd, x[2] - head[2], x[3] - head[3]);
            mma_16n8k8_tf32(sum, even, head[0], head[1]);
            mma_16n8k8_tf32(sum, odd, head[2], head[3]);
            low[2 * h] = sum[0], low[2 * h + 1] = sum[1], high[2 * h] = sum[2], high[2 * h + 1] = sum[3];
        }
    }
};

__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float difference = a - b;
    a += b;
    b = difference;
}

// The last butterfly of a transform with its norm.
__device__ __forceinline__ void scaled_butterfly(float& a, float& b, float norm) {
    const float scaled = b * norm;
    b = fmaf(a, norm, -scaled);
    a = fmaf(a, norm, scaled);
}

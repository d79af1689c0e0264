// What both matrix products share (gemm_sm90.cu and gemm_mma.cu): the problem, the order of tiles, writing of results.
#pragma once

#include "epilogue/output.cuh"
#include "ptx/instructions.cuh"

constexpr int kTilesPerGroup = 16;  // token tiles that take turns before the next feature tile, to share L2

struct Problem {
    const float* row_scale;     // [rows], or [1]
    const float* column_scale;  // [features], or [features, groups]
    const void* bias;           // [features] of the output's type, or null
    void* out;                  // [rows, features]
    int rows, features, k_steps, row_scale_stride, dtype;
    int tensor_store;  // the copy engine can write `out`: 16-bit elements, rows of a multiple of 16 bytes
    int box_rows;      // tokens that a block of a cluster fetches for all of it, a multiple of 8 (sm_90a)
};

// Position of a tile: groups of token tiles, inside a group tokens first, then features.
struct Tile {
    int token, feature;
};

__device__ __forceinline__ Tile tile_at(int index, int token_tiles, int feature_tiles) {
    const int group = index / (kTilesPerGroup * feature_tiles);
    const int inside = index - group * kTilesPerGroup * feature_tiles;
    const int first = group * kTilesPerGroup;
    const int height = min(kTilesPerGroup, token_tiles - first);
    return {first + inside % height, inside / height};
}

// First operand of an instruction on 32 of K: packed words of row g and of row g + 8 of a strip; values times 16.
__device__ __forceinline__ void unpack_weights(u32 (&a)[4], u32 row, u32 row_8) {
    constexpr u32 kHigh = 0xF0F0F0F0u;
    a[0] = row << 4 & kHigh;
    a[1] = row_8 << 4 & kHigh;
    a[2] = row & kHigh;
    a[3] = row_8 & kHigh;
}

__device__ __forceinline__ float bias_at(const Problem& p, int feature) {
    if (p.bias == nullptr || feature >= p.features) return 0.f;
    return load_as_float(p.bias, feature, p.dtype);
}

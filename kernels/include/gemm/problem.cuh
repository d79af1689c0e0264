// What both matrix products share (gemm_sm90.cu and gemm_mma.cu): the problem, the order of tiles, writing of results.
#pragma once

#include "ptx/instructions.cuh"

constexpr int kTilesPerGroup = 16;  // token tiles that take turns before the next feature tile, to share L2

enum OutputType { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2 };

struct Problem {
    const float* row_scale;     // [rows], or [1]
    const float* column_scale;  // [features], or [features, groups]
    const void* bias;           // [features] of the output's type, or null
    void* out;                  // [rows, features]
    int rows, features, k_steps, row_scale_stride, type;
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
    if (p.type == kFloat16) return __half2float(static_cast<const __half*>(p.bias)[feature]);
    if (p.type == kBfloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[feature]);
    return static_cast<const float*>(p.bias)[feature];
}

// Two neighbouring tokens of one feature as 16-bit floats in a word.
__device__ __forceinline__ u32 pack_pair(float first, float second, int type) {
    if (type == kFloat16) {
        const __half2 pair = __floats2half2_rn(first, second);
        return reinterpret_cast<const u32&>(pair);
    }
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const u32&>(pair);
}

__device__ __forceinline__ void store_one(unsigned char* at, float value, int type) {
    if (type == kFloat16) {
        *reinterpret_cast<__half*>(at) = __float2half_rn(value);
    } else if (type == kBfloat16) {
        *reinterpret_cast<__nv_bfloat16*>(at) = __float2bfloat16_rn(value);
    } else {
        *reinterpret_cast<float*>(at) = value;
    }
}


// What a product of few rows streams: the problem, how it is cut up, and a group's ring of asynchronous copies with the
// tensor-core operands read from it. kernels/gemv.cu and kernels/w4a16.cu multiply and add; nothing here does.
// Architectures: sm_80 and newer.
#pragma once

#include "ptx/instructions.cuh"

constexpr int kBlockK = 64;   // input features of one packed block
constexpr int kStageK = 128;  // input features of one stage; one group of scales
constexpr int kStrip = 16;    // output features of one strip
constexpr int kBlockBytes = kStrip * kBlockK / 2;

using WeightFragment = u32[4];  // A of m16n8k32: features (g, g + 8) at k 4t..4t+3, then at k 16+4t..16+4t+3
using Sums = int[4];            // D of m16n8k32: features g, g, g + 8, g + 8; rows 2t, 2t + 1, 2t, 2t + 1

// What one launch computes. Pointers are 16-byte aligned and tensors contiguous.
struct Problem {
    const unsigned char* activations;  // [rows, inner] of 8 or 16 bits, or [rows, inner / 2] packed
    const float* row_scale;            // [rows], or [1] with row_scale_step 0
    const unsigned char* weight;       // [strips, ceil(inner / 64), 32, 16]
    const float* column_scale;         // [features], or of feature f and group g at f * feature_step + g * group_step
    const void* bias;                  // [features] of the output's dtype, or null
    void* out;                         // [rows, features]
    int rows, features, inner, row_scale_step, feature_step, group_step, dtype;
    int early;  // the launch overlaps its predecessor, so weights are requested before anything else is read
};

// How a launch is cut up; every member is known to the compiler.
template <int RowCapacity, int StripsPerWarp, int WarpsAcross, int WarpsAlong, int Depth, int ClusterSize,
          int RowBits, bool GroupScales>
struct Shape {
    static constexpr int kRows = RowCapacity;                    // at least the problem's rows
    static constexpr int kTiles = (RowCapacity + 7) / 8;         // of 8 rows, one matrix instruction
    static constexpr int kStrips = StripsPerWarp;                // per warp
    static constexpr int kAcross = WarpsAcross;                  // warps of a group: other strips, same activations
    static constexpr int kAlong = WarpsAlong;                    // groups of a block: same strips, other stages
    static constexpr int kDepth = Depth;                         // slots of a group's ring
    static constexpr int kCluster = ClusterSize;                 // blocks that split the stages of their strips
    static constexpr int kRowBits = RowBits;                     // of an activation: 4 (packed), 8 or 16
    static constexpr bool kPacked = RowBits == 4;
    static constexpr bool kGrouped = GroupScales;
    static constexpr int kThreads = 32 * WarpsAcross * WarpsAlong;
    static constexpr int kBlockStrips = StripsPerWarp * WarpsAcross;
    static constexpr int kFeatures = kBlockStrips * kStrip;      // of a block
    static constexpr int kRowBytes = kStageK * RowBits / 8;
    static constexpr int kRowChunks = kRowBytes / 16;
    static constexpr int kWeightBytes = kBlockStrips * 2 * kBlockBytes;
    static constexpr int kUsedBytes = kWeightBytes + RowCapacity * kRowBytes + (GroupScales ? kFeatures * 4 : 0);
    static constexpr int kSlotUnit = RowBits == 16 && RowCapacity >= 16 ? 1024 : 16;  // what warpgroups read is aligned
    static constexpr int kSlotBytes = (kUsedBytes + kSlotUnit - 1) / kSlotUnit * kSlotUnit;
    static constexpr int kPartialStep = kFeatures + 4;           // words; the 4 keep the stores off shared banks
    static constexpr int kRingBytes = Depth * kSlotBytes;
    static constexpr int kPartialBytes = RowCapacity * kPartialStep * 4;
    static constexpr int kGroupBytes = kRingBytes > kPartialBytes ? kRingBytes : kPartialBytes;
    static constexpr int kSharedBytes = WarpsAlong * kGroupBytes + 4 * (RowCapacity + kFeatures);  // scales at the end
    static constexpr int kFactor = RowBits == 4 ? 256 : 16;      // nibbles are multiplied in the upper half of a byte
};

// Byte of 16-byte chunk `chunk` of a row of activations in a slot: 8 rows at one chunk lie in 8 different bank groups.
// Rows of 16 bits are cut into two tiles of 64 inputs, each in the 128-byte swizzle of `ptx::wgmma_descriptor`.
template <class S>
__device__ __forceinline__ int activation_offset(int row, int chunk) {
    if constexpr (S::kRowBits == 16) return (chunk / 8 * S::kRows + row) * 128 + (chunk % 8 ^ row & 7) * 16;
    const int swizzle = S::kRowBits == 4 ? (row >> 1) & 3 : row & 7;
    return row * S::kRowBytes + (chunk ^ swizzle) * 16;
}

__device__ __forceinline__ u32 low_nibbles(u32 word) { return (word << 4) & 0xf0f0f0f0u; }
__device__ __forceinline__ u32 high_nibbles(u32 word) { return word & 0xf0f0f0f0u; }

// One group's view of the problem: what it copies into its ring and where.
template <class S>
struct Ring {
    const Problem& problem;
    u32 base;                     // shared address of the group's ring
    int lane, warp, thread;       // warp and thread: in the group
    int first_strip;              // of the block
    int k_blocks, row_bytes;
    // What this lane or thread copies first of stage 0: of its warp's first strip, of the rows, of the scales.
    const unsigned char* weight;
    const unsigned char* activations;
    const float* scale;

    __device__ __forceinline__ Ring(const Problem& p, u32 ring, int group_thread, int strip)
        : problem(p), base(ring), lane(group_thread % 32), warp(group_thread / 32), thread(group_thread),
          first_strip(strip), k_blocks((p.inner + kBlockK - 1) / kBlockK), row_bytes(p.inner * S::kRowBits / 8) {
        const size_t mine = size_t(strip + warp * S::kStrips) * k_blocks * kBlockBytes;
        weight = p.weight + mine + lane * 16;
        activations = p.activations + size_t(thread / S::kRowChunks) * row_bytes + thread % S::kRowChunks * 16;
        scale = p.column_scale + size_t(first_feature() + lane) * p.feature_step;
    }

    __device__ __forceinline__ int first_feature() const { return (first_strip + warp * S::kStrips) * kStrip; }
    __device__ __forceinline__ u32 slot(int index) const { return base + index * S::kSlotBytes; }
    __device__ __forceinline__ u32 weight_slot(int index, int strip, int half) const {
        return slot(index) + ((warp * S::kStrips + strip) * 2 + half) * kBlockBytes + lane * 16;
    }
    __device__ __forceinline__ u32 activation_slot(int index) const { return slot(index) + S::kWeightBytes; }
    __device__ __forceinline__ u32 scale_slot(int index) const {
        return activation_slot(index) + S::kRows * S::kRowBytes + warp * S::kStrips * kStrip * 4;
    }

    // Start the copies of one stage of the weight. Past its ends zeros are written and nothing is read.
    __device__ __forceinline__ void load_weight(int index, int stage) const {
        const int strips = (problem.features + kStrip - 1) / kStrip;
        const unsigned char* from = weight + size_t(stage) * (2 * kBlockBytes);
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip) {
            const bool exists = first_strip + warp * S::kStrips + strip < strips;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                ptx::cp_async_16(weight_slot(index, strip, half),
                                 from + size_t(strip) * k_blocks * kBlockBytes + half * kBlockBytes,
                                 exists && 2 * stage + half < k_blocks);
        }
        if constexpr (S::kGrouped) load_scales(index, stage);
    }

    // A thread's chunk is the same of every row that it copies.
    __device__ __forceinline__ void load_activations(int index, int stage) const {
        constexpr int kRowsAtOnce = 32 * S::kAcross / S::kRowChunks;
        const int chunk = thread % S::kRowChunks;
        const bool valid = stage * S::kRowBytes + chunk * 16 < row_bytes;
        const unsigned char* from = activations + size_t(stage) * S::kRowBytes;
#pragma unroll
        for (int first = 0; first < S::kRows; first += kRowsAtOnce) {
            const int row = first + thread / S::kRowChunks;
            if (row < problem.rows)
                ptx::cp_async_16(activation_slot(index) + activation_offset<S>(row, chunk),
                                 from + size_t(first) * row_bytes, valid);
        }
    }

    __device__ __forceinline__ void load_scales(int index, int group) const {
        const float* from = scale + size_t(group) * problem.group_step;
#pragma unroll
        for (int first = 0; first < S::kStrips * kStrip; first += 32) {
            if (first + lane < S::kStrips * kStrip)
                ptx::cp_async_4(scale_slot(index) + (first + lane) * 4, from + size_t(first) * problem.feature_step,
                                first_feature() + first + lane < problem.features);
        }
    }

    // Half `half` of a stage of one strip as two operands, values times 16.
    __device__ __forceinline__ void weights(WeightFragment (&a)[2], int index, int strip, int half) const {
        u32 w[4];
        ptx::load_shared_16(w, weight_slot(index, strip, half));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            a[part][0] = low_nibbles(w[2 * part]), a[part][1] = low_nibbles(w[2 * part + 1]);
            a[part][2] = high_nibbles(w[2 * part]), a[part][3] = high_nibbles(w[2 * part + 1]);
        }
    }

    // Half of a stage of `Tiles` times 8 rows: for each two operands of 32 input features, two registers each.
    template <int Tiles>
    __device__ __forceinline__ void rows(u32 (&b)[Tiles][4], int index, int tile, int half) const {
        if constexpr (!S::kPacked) {
#pragma unroll
            for (int i = 0; i < Tiles; ++i)
                ptx::ldmatrix_x4(b[i], activation_address(index, tile + i, 4 * half + lane / 8));
        } else {
            u32 words[2 * Tiles];
            if constexpr (Tiles == 2)
                ptx::ldmatrix_x4(words, activation_address(index, tile + lane / 16, 2 * half + lane / 8 % 2));
            else
                ptx::ldmatrix_x2(words, activation_address(index, tile, 2 * half + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 2 * Tiles; ++i) {
                b[i / 2][i % 2 * 2] = low_nibbles(words[i]);
                b[i / 2][i % 2 * 2 + 1] = high_nibbles(words[i]);
            }
        }
    }

    // Where this lane's row of a tile lies. A capacity below 8 repeats its last row: columns that nobody stores.
    __device__ __forceinline__ u32 activation_address(int index, int tile, int chunk) const {
        return activation_slot(index) + activation_offset<S>(tile * 8 + min(lane % 8, S::kRows - 1), chunk);
    }
};

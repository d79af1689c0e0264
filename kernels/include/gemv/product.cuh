// The frame of a product of few rows, whatever the types of its operands: groups of warps take their stages from rings
// (gemv/ring.cuh), and blocks, or clusters of them, add up and store. kernels/gemv.cu and kernels/w4a16.cu give it what
// a stage is multiplied with, and what is applied to the sums.
// Architectures: sm_80 and newer; clusters on sm_90 and newer.
#pragma once

#include "epilogue/output.cuh"
#include "gemv/ring.cuh"

// Sums of a warp: 8-row tiles by strips, each as the tensor core has it.
template <class S, class V>
struct Totals {
    using Value = V;
    Value values[S::kTiles][S::kStrips][4];

    __device__ __forceinline__ Totals() {
#pragma unroll
        for (int i = 0; i < S::kTiles * S::kStrips * 4; ++i) (&values[0][0][0])[i] = 0;
    }

    // This thread's copies of a stage have arrived, those of others perhaps not.
    __device__ __forceinline__ void prepare(const Ring<S>&, int) {}

    // Add sums of one stage and some tiles, times its scales.
    template <int Tiles, class Sum>
    __device__ __forceinline__ void add_scaled(int tile, const Sum (&sums)[Tiles][S::kStrips][4],
                                               const Ring<S>& ring, int index) {
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int feature = strip * kStrip + half * 8 + ring.lane / 4;
                const float scale = ptx::load_shared_float(ring.scale_slot(index) + feature * 4);
#pragma unroll
                for (int next = 0; next < Tiles; ++next)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i)
                        values[tile + next][strip][i] += float(sums[next][strip][i]) * scale;
            }
    }

    // Write to a group's partial sums [rows, kPartialStep] in shared memory.
    __device__ __forceinline__ void store(Value* partial, int warp, int lane, int rows) const {
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip)
#pragma unroll
            for (int tile = 0; tile < S::kTiles; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = tile * 8 + lane % 4 * 2 + i % 2;
                    const int feature = (warp * S::kStrips + strip) * kStrip + lane / 4 + i / 2 * 8;
                    if (row < rows) partial[row * S::kPartialStep + feature] = values[tile][strip][i];
                }
    }
};

// Blocks that work on the same strips: one, or a cluster that reads one another's shared memory.
template <int Size>
struct Team {
#if __CUDA_ARCH__ >= 900
    static __device__ __forceinline__ void barrier() { ptx::cluster_sync(); }
    static __device__ __forceinline__ void load(u32 (&words)[4], u32 shared, int rank) {
        ptx::load_cluster_16(words, shared, rank);
    }
#endif
};
template <>
struct Team<1> {
    static __device__ __forceinline__ void barrier() { __syncthreads(); }
    static __device__ __forceinline__ void load(u32 (&words)[4], u32 shared, int) {
        ptx::load_shared_16(words, shared);
    }
};

__device__ __forceinline__ void add(int& sum, u32 word) { sum += static_cast<int>(word); }
__device__ __forceinline__ void add(float& sum, u32 word) { sum += __uint_as_float(word); }

// Four features of a row over all groups of all blocks, always added in the same order.
template <class S, class Value>
__device__ __forceinline__ void add_partials(Value (&sums)[4], u32 partials, int row, int column) {
#pragma unroll
    for (int rank = 0; rank < S::kCluster; ++rank)
#pragma unroll
        for (int group = 0; group < S::kAlong; ++group) {
            u32 words[4];
            const u32 partial = partials + group * S::kGroupBytes + (row * S::kPartialStep + column) * 4;
            Team<S::kCluster>::load(words, partial, rank);
#pragma unroll
            for (int i = 0; i < 4; ++i) add(sums[i], words[i]);
        }
}

// Add up and store this block's share of the outputs.
template <class S, class Total, class Scales>
__device__ __forceinline__ void finish(const Problem& p, const Scales& scales, u32 partials, int rank,
                                       int first_feature) {
    constexpr int kQuads = S::kFeatures / 4;
    for (int i = rank * S::kThreads + threadIdx.x; i < p.rows * kQuads; i += S::kCluster * S::kThreads) {
        const int row = i / kQuads, column = i % kQuads * 4;
        typename Total::Value sums[4] = {0, 0, 0, 0};
        add_partials<S>(sums, partials, row, column);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int feature = first_feature + column + j;
            if (feature >= p.features) break;
            float y = scales.apply(sums[j], row, column + j);
            if (p.bias) y = __fadd_rn(y, load_as_float(p.bias, feature, p.dtype));
            store_float(p.out, size_t(row) * p.features + feature, y, p.dtype);
        }
    }
}

template <class S>
__device__ __forceinline__ void group_barrier(int group) {
    if constexpr (S::kAcross == 1)
        __syncwarp();
    else if constexpr (S::kAlong == 1)
        __syncthreads();
    else
        ptx::named_barrier<32 * S::kAcross>(1 + group);
}

// Start the copies of the first kDepth - 1 stages. Nothing that an earlier launch writes is read before its end.
template <class S, class Scales>
__device__ __forceinline__ void start(const Problem& p, const Ring<S>& ring, const Scales& scales, int first,
                                      int step, int stages) {
    scales.load_columns(p, ring.first_strip * kStrip);
    if (p.early) {
#pragma unroll
        for (int slot = 0; slot < S::kDepth - 1; ++slot)
            if (first + slot * step < stages) ring.load_weight(slot, first + slot * step);
    }
    ptx::await_previous_launch();
    scales.load_rows(p);
#pragma unroll
    for (int slot = 0; slot < S::kDepth - 1; ++slot) {
        if (first + slot * step < stages) {
            if (!p.early) ring.load_weight(slot, first + slot * step);
            ring.load_activations(slot, first + slot * step);
        }
        ptx::cp_async_commit();
    }
}

// Stages that a group works on, `left` of them lying at and after its first.
template <class S>
__device__ __forceinline__ int turns(int left) {
    constexpr int kStep = S::kCluster * S::kAlong;
    return (max(left, 0) + kStep - 1) / kStep;
}

// Grid: kCluster blocks for each kBlockStrips strips. Dynamic shared memory: for each of kAlong groups kDepth slots, or
// the partial sums that take their place; then the scales.
template <class S, class Total, class Scales>
__device__ __forceinline__ void product(const Problem& p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    ptx::release_next_launch();
    // One for a warp, and known to be so, where instructions want it in a uniform register.
    const int own_group = threadIdx.x / (32 * S::kAcross);
    const int group = S::kAlong == 1 ? 0 : S::kRowBits == 16 ? __shfl_sync(0xFFFFFFFFu, own_group, 0) : own_group;
    const int rank = blockIdx.x % S::kCluster;
    const int first_strip = blockIdx.x / S::kCluster * S::kBlockStrips;
    const Scales scales(shared + S::kAlong * S::kGroupBytes);
    const Ring<S> ring(p, ptx::shared_address(shared) + group * S::kGroupBytes, threadIdx.x % (32 * S::kAcross),
                       first_strip);

    constexpr int kStep = S::kCluster * S::kAlong;
    const int stages = (p.inner + kStageK - 1) / kStageK, first = rank * S::kAlong + group;
    start(p, ring, scales, first, kStep, stages);
    Total sums;
    int slot = 0;
    for (int stage = first; stage < stages; stage += kStep) {
        ptx::cp_async_wait<S::kDepth - 2>();
        sums.prepare(ring, slot);
        group_barrier<S>(group);  // the copies of the others have arrived, and they have left the slot filled next
        const int freed = slot == 0 ? S::kDepth - 1 : slot - 1, next = stage + (S::kDepth - 1) * kStep;
        if (next < stages) {
            ring.load_weight(freed, next);
            ring.load_activations(freed, next);
        }
        ptx::cp_async_commit();
        sums.stage(ring, slot);
        slot = slot == S::kDepth - 1 ? 0 : slot + 1;
    }
    // racecheck counts barriers, so groups that took a turn less than the first group pass one more.
    if (S::kAcross > 1 && turns<S>(stages - first) < turns<S>(stages - rank * S::kAlong)) group_barrier<S>(group);
    ptx::cp_async_wait<0>();
    __syncthreads();

    auto* partials = reinterpret_cast<typename Total::Value*>(shared + group * S::kGroupBytes);
    sums.store(partials, ring.warp, ring.lane, p.rows);
    Team<S::kCluster>::barrier();
    finish<S, Total>(p, scales, ptx::shared_address(shared), rank, first_strip * kStrip);
    if constexpr (S::kCluster > 1) Team<S::kCluster>::barrier();  // others may still read this block's sums
}

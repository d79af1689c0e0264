// W4A4 and W4A8 matrix product on Hopper (sm_90a): int8 warpgroup instructions on weights that stay 4-bit until they
// are in registers, exact int32 sums, scales applied once at the end (QuaRot Sec. 4, stage 2a, App. A.10).
//
// The product is computed transposed, out[feature, token], since only the first operand may come from registers and
// only weights need unpacking on the way. A nibble moved to the high half of a byte is its value times 16, so sums are
// 16 times too large, which the scale of a row undoes exactly.
//
// One block per multiprocessor. A thread of the last warpgroup fills a ring of shared-memory stages (128 of K each)
// through the copy engine; the other warpgroups multiply, each 64 x Strips features by Tokens tokens. Blocks of a
// cluster hold neighbouring features of the same tokens and fetch the activations for one another (multicast).

#include "gemm/results.cuh"
#include "mma/warpgroup_s8.cuh"

constexpr int kStep = 128;  // of K, in one stage

// One instance of the kernel: its sizes, and offsets in bytes of dynamic shared memory.
template <int Consumers, int Strips, int Tokens, int Stages, int Cluster, bool Grouped>
struct Shape {
    static constexpr int kConsumers = Consumers, kStrips = Strips, kTokens = Tokens, kStages = Stages,
                         kCluster = Cluster;
    static constexpr bool kGrouped = Grouped;
    static constexpr bool kMovesRegisters = Consumers > 1;                 // a lone consumer starts with enough
    static constexpr int kConsumerRegisters = Consumers == 2 ? 240 : 160;  // with 24 for each producer: all there are
    static constexpr int kFeatures = Consumers * Strips * 64;
    static constexpr int kWeightBytes = kFeatures * kStep / 2;
    static constexpr int kCodeBytes = Tokens * kStep;
    static constexpr int kStageBytes = kWeightBytes + kCodeBytes;
    static constexpr int kStagingBytes = 2 * kChunk * 128;  // of one warpgroup: rows of 64 features of 2 bytes
    static constexpr int kScales = Tokens + Strips * 64;    // floats of one warpgroup
    static constexpr int kStaging = Stages * kStageBytes;
    static constexpr int kScale = kStaging + Consumers * kStagingBytes;
    static constexpr int kBarriers = kScale + Consumers * kScales * 4;
    static constexpr int kSharedBytes = kBarriers + 16 * Stages;
    static constexpr int kRegisters = Tokens / 2;  // of one thread, for the sums of 64 features
};

// The tiles of this block: the blocks of a cluster, by rank, have neighbouring features of the same tokens.
template <class S>
struct Schedule {
    int rank, token_tiles, feature_tiles, tiles;

    __device__ __forceinline__ explicit Schedule(const Problem& p) {
        rank = S::kCluster == 1 ? 0 : ptx::cluster_rank();
        token_tiles = (p.rows + S::kTokens - 1) / S::kTokens;
        feature_tiles = (p.features + S::kFeatures * S::kCluster - 1) / (S::kFeatures * S::kCluster);
        tiles = token_tiles * feature_tiles;
    }
    __device__ __forceinline__ int first() const { return blockIdx.x / S::kCluster; }
    __device__ __forceinline__ int stride() const { return gridDim.x / S::kCluster; }
    // First token and first feature of a tile. The last tile of tokens ends where they end and repeats some of the one
    // before: boxes that reach beyond a tensor are slow, and equal results may be written twice.
    __device__ __forceinline__ Tile at(int index, int rows) const {
        const Tile tile = tile_at(index, token_tiles, feature_tiles);
        return {min(tile.token * S::kTokens, max(rows - S::kTokens, 0)),
                (tile.feature * S::kCluster + rank) * S::kFeatures};
    }
};

// The ring of stages as one side sees it.
template <int Stages>
struct Ring {
    u32 full, empty;  // addresses of the first barriers of both kinds
    int stage = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == Stages) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ u32 full_barrier() const { return full + 8 * stage; }
    __device__ __forceinline__ u32 empty_barrier() const { return empty + 8 * stage; }
};

// One warp of the consumers has read a stage: tell the producers of all blocks that write to it.
template <int Cluster>
__device__ __forceinline__ void release(u32 barrier) {
    const int lane = threadIdx.x % 32;
    if constexpr (Cluster == 1) {
        if (lane == 0) ptx::mbarrier_arrive(barrier);
    } else {
        if (lane < Cluster) ptx::mbarrier_arrive_cluster(barrier, lane);
    }
}

template <class S>
__device__ __forceinline__ void produce(u32 shared, Ring<S::kStages> ring, const ptx::TensorMap& weight,
                                        const ptx::TensorMap& codes, const Problem& p, const Schedule<S>& schedule) {
    const u32 code_bytes = S::kCluster * p.box_rows * kStep;
    for (int index = schedule.first(); index < schedule.tiles; index += schedule.stride()) {
        const Tile tile = schedule.at(index, p.rows);
        const int strip = tile.feature / 16, token = tile.token + schedule.rank * p.box_rows;  // this block's share
        const bool inside = tile.feature < p.features;  // else only activations are fetched, for the cluster
        for (int step = 0; step < p.k_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ring.empty_barrier(), ring.parity ^ 1);
            const u32 barrier = ring.full_barrier(), weights = shared + ring.stage * S::kStageBytes;
            const u32 share = weights + S::kWeightBytes + schedule.rank * p.box_rows * kStep;
            ptx::mbarrier_arrive_expect(barrier, code_bytes + (inside ? S::kWeightBytes : 0));
            if (inside) ptx::tma_load_2d(weights, weight, step * (1024 / 4), strip, barrier);
            if constexpr (S::kCluster == 1) {
                ptx::tma_load_2d(share, codes, step * kStep, token, barrier);
            } else {
                ptx::tma_load_2d_multicast(share, codes, step * kStep, token, barrier, (1 << S::kCluster) - 1);
            }
        }
    }
}

// Packed weights of one thread for one stage: of each strip two times 64 of K.
template <int Strips>
struct PackedWeights {
    u32 words[Strips][2][4];

    __device__ __forceinline__ void load(u32 from) {
#pragma unroll
        for (int m = 0; m < Strips; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) ptx::load_shared_16(words[m][half], from + m * 4096 + half * 512);
    }
    // Operand of the instruction on the `step`-th 32 of K.
    __device__ __forceinline__ void unpack(u32 (&a)[4], int m, int step) const {
        const u32(&w)[4] = words[m][step / 2];
        step % 2 == 0 ? unpack_weights(a, w[0], w[1]) : unpack_weights(a, w[2], w[3]);
    }
};

// Where this thread's packed weights begin in a stage: strips of 1024 bytes, four for each 64 features.
template <int Strips>
__device__ __forceinline__ u32 own_weights() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // warp 4 w + i: warpgroup w
    return (warp / 4 * Strips * 4 + warp % 4) * 1024 + lane * 16;
}

// Sums of one tile. Two sets of operand registers take turns: one is unpacked while instructions read the other.
template <class S>
__device__ __forceinline__ void multiply(int (&sums)[S::kStrips][S::kRegisters], u32 shared, Ring<S::kStages>& ring,
                                         int k_steps) {
    const u32 own = own_weights<S::kStrips>();
    u32 a[4][S::kStrips][4] = {};
    PackedWeights<S::kStrips> packed;
    u32 previous = 0;
    for (int step = 0; step < k_steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(ring.full_barrier(), ring.parity);
        const u32 stage = shared + ring.stage * S::kStageBytes;
        const u64 codes = ptx::wgmma_descriptor(stage + S::kWeightBytes);
        packed.load(stage + own);
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
            ptx::wgmma_wait<1>();
            if (half > 0 && step > 0) release<S::kCluster>(previous);
#pragma unroll
            for (int i = half; i < half + 2; ++i)
#pragma unroll
                for (int m = 0; m < S::kStrips; ++m) {
                    ptx::keep_registers(a[i][m]);
                    packed.unpack(a[i][m], m, i);
                    ptx::keep_registers(a[i][m]);
                }
            ptx::wgmma_fence();
#pragma unroll
            for (int i = half; i < half + 2; ++i)
#pragma unroll
                for (int m = 0; m < S::kStrips; ++m) ptx::wgmma_s8(sums[m], a[i][m], codes + 2 * i, step + i > 0);
            ptx::wgmma_commit();
        }
        previous = ring.empty_barrier();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < S::kStrips; ++m) ptx::keep_registers(sums[m]);
    release<S::kCluster>(previous);
}

// Sums of one tile with a scale for each group of 128 along K, which is one stage. Two sets of sums take turns: while
// the tensor cores fill one, the other is scaled and added to `values`. `scale` points to this thread's two features.
template <class S>
__device__ __forceinline__ void multiply_grouped(float (&values)[S::kRegisters], u32 shared, Ring<S::kStages>& ring,
                                                 int groups, const float* (&scale)[2]) {
    const u32 own = own_weights<1>();
    int sums[2][S::kRegisters];
    u32 a[4][4] = {};
    auto start = [&](int set) {
        ptx::mbarrier_wait(ring.full_barrier(), ring.parity);
        const u32 stage = shared + ring.stage * S::kStageBytes;
        const u64 codes = ptx::wgmma_descriptor(stage + S::kWeightBytes);
        PackedWeights<1> packed;
        packed.load(stage + own);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            ptx::wgmma_wait<3>();
            ptx::keep_registers(a[i]);
            packed.unpack(a[i], 0, i);
            ptx::keep_registers(a[i]);
            ptx::wgmma_fence();
            ptx::wgmma_s8(sums[set], a[i], codes + 2 * i, i > 0);
            ptx::wgmma_commit();
        }
    };
    auto finish = [&](int set, int group, u32 stage_read) {
        ptx::keep_registers(sums[set]);
        release<S::kCluster>(stage_read);
        const float factor[2] = {__ldg(scale[0] + group), __ldg(scale[1] + group)};
#pragma unroll
        for (int i = 0; i < S::kRegisters; ++i)
            values[i] = __fmaf_rn(__int2float_rn(sums[set][i]), factor[i / 2 % 2], values[i]);
    };
    auto turn = [&](int set, int group) {  // `set` is being filled: start the other, then take this one
        const u32 stage_read = ring.empty_barrier();
        ring.advance();
        start(1 - set);
        ptx::wgmma_wait<4>();
        finish(set, group, stage_read);
    };
#pragma unroll
    for (int i = 0; i < S::kRegisters; ++i) values[i] = 0.f;
    start(0);
    int group = 0;
    for (; group + 2 < groups; group += 2) {
        turn(0, group);
        turn(1, group + 1);
    }
    if (group + 1 < groups) {
        turn(0, group);
        ptx::wgmma_wait<0>();
        finish(1, group + 1, ring.empty_barrier());
    } else {
        ptx::wgmma_wait<0>();
        finish(0, group, ring.empty_barrier());
    }
    ring.advance();
}

// What a consumer does: tile after tile, sums, then results.
template <class S>
__device__ __forceinline__ void consume(unsigned char* memory, u32 shared, Ring<S::kStages>& ring,
                                        const ptx::TensorMap& out, const Problem& p, const Schedule<S>& schedule,
                                        int warpgroup) {
    const u32 scales = S::kScale + warpgroup * S::kScales * 4;
    const float* row_scale = reinterpret_cast<const float*>(memory + scales);
    const u32 staging = shared + S::kStaging + warpgroup * S::kStagingBytes;
    const int barrier = 1 + warpgroup;
    int chunk = 0;
    for (int index = schedule.first(); index < schedule.tiles; index += schedule.stride()) {
        const Tile tile = schedule.at(index, p.rows);
        const int token = tile.token, feature = tile.feature + warpgroup * S::kStrips * 64;
        cuda::std::conditional_t<S::kGrouped, float, int> sums[S::kStrips][S::kRegisters];
        fetch_scales<S::kStrips, S::kTokens, S::kGrouped>(shared + scales, p, token, feature);
        if constexpr (S::kGrouped) {
            const float* scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int own = feature + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
                scale[h] = p.column_scale + static_cast<long long>(min(own, p.features - 1)) * p.k_steps;
            }
            multiply_grouped<S>(sums[0], shared, ring, p.k_steps, scale);
        } else {
            multiply<S>(sums, shared, ring, p.k_steps);
        }
        ptx::cp_async_wait<0>();
        ptx::named_barrier<kWarpgroup>(barrier);  // the scales have arrived
#pragma unroll
        for (int m = 0; m < S::kStrips; ++m) {
            const Scaling scaling(S::kGrouped ? nullptr : row_scale + S::kTokens + 64 * m, p, feature + 64 * m);
            write<S::kTokens>(sums[m], row_scale, scaling, staging, chunk, p, out, token, feature + 64 * m, barrier);
        }
        ptx::named_barrier<kWarpgroup>(barrier);  // the scales have been read
    }
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait();
}

template <int Consumers, int Strips, int Tokens, int Stages, int Cluster, bool Grouped>
__global__ void __cluster_dims__(Cluster, 1, 1) __launch_bounds__((Consumers + 1) * kWarpgroup, 1)
    w4_gemm(const __grid_constant__ ptx::TensorMap weight, const __grid_constant__ ptx::TensorMap codes,
            const __grid_constant__ ptx::TensorMap out, const __grid_constant__ Problem p) {
    using S = Shape<Consumers, Strips, Tokens, Stages, Cluster, Grouped>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = ptx::shared_address(memory);
    Ring<Stages> ring{shared + S::kBarriers, shared + S::kBarriers + 8 * Stages};
    const int warpgroup = threadIdx.x / kWarpgroup;
    const Schedule<S> schedule(p);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Stages; ++i) {
            ptx::mbarrier_init(ring.full + 8 * i, 1);
            ptx::mbarrier_init(ring.empty + 8 * i, Consumers * 4 * Cluster);
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    if constexpr (Cluster > 1) ptx::cluster_sync();

    if (warpgroup == Consumers) {
        if constexpr (S::kMovesRegisters) ptx::registers_shrink<24>();
        if (threadIdx.x == Consumers * kWarpgroup) produce<S>(shared, ring, weight, codes, p, schedule);
        __syncwarp();
    } else {
        if constexpr (S::kMovesRegisters) ptx::registers_grow<S::kConsumerRegisters>();
        consume<S>(memory, shared, ring, out, p, schedule, warpgroup);
    }
    if constexpr (Cluster > 1) ptx::cluster_sync();  // a block's memory stays while others write to it
}

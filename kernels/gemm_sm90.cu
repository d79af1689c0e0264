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

constexpr int STEP = 128;  // of K, in one stage

// One instance of the kernel: its sizes, and offsets in bytes of dynamic shared memory.
template <int Consumers, int Strips, int Tokens, int Stages, int Cluster, bool Grouped>
struct Shape {
    static constexpr int consumers = Consumers, strips = Strips, tokens = Tokens, stages = Stages, cluster = Cluster;
    static constexpr bool grouped = Grouped;
    static constexpr bool moves_registers = Consumers > 1;                 // a lone consumer starts with enough
    static constexpr int consumer_registers = Consumers == 2 ? 240 : 160;  // with 24 for each producer: all there are
    static constexpr int features = Consumers * Strips * 64;
    static constexpr int weight_bytes = features * STEP / 2;
    static constexpr int code_bytes = Tokens * STEP;
    static constexpr int stage_bytes = weight_bytes + code_bytes;
    static constexpr int staging_bytes = 2 * CHUNK * 128;  // of one warpgroup: rows of 64 features of 2 bytes
    static constexpr int scales = Tokens + Strips * 64;    // floats of one warpgroup
    static constexpr int staging = Stages * stage_bytes;
    static constexpr int scale = staging + Consumers * staging_bytes;
    static constexpr int barriers = scale + Consumers * scales * 4;
    static constexpr int shared_bytes = barriers + 16 * Stages;
    static constexpr int registers = Tokens / 2;  // of one thread, for the sums of 64 features
};

// The tiles of this block: the blocks of a cluster, by rank, have neighbouring features of the same tokens.
template <class S>
struct Schedule {
    int rank, token_tiles, feature_tiles, tiles;

    __device__ __forceinline__ explicit Schedule(const Problem& p) {
        rank = S::cluster == 1 ? 0 : ptx::cluster_rank();
        token_tiles = (p.rows + S::tokens - 1) / S::tokens;
        feature_tiles = (p.features + S::features * S::cluster - 1) / (S::features * S::cluster);
        tiles = token_tiles * feature_tiles;
    }
    __device__ __forceinline__ int first() const { return blockIdx.x / S::cluster; }
    __device__ __forceinline__ int stride() const { return gridDim.x / S::cluster; }
    // First token and first feature of a tile. The last tile of tokens ends where they end and repeats some of the one
    // before: boxes that reach beyond a tensor are slow, and equal results may be written twice.
    __device__ __forceinline__ Tile at(int index, int rows) const {
        const Tile tile = tile_at(index, token_tiles, feature_tiles);
        return {min(tile.token * S::tokens, max(rows - S::tokens, 0)),
                (tile.feature * S::cluster + rank) * S::features};
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
__device__ __forceinline__ void produce(u32 shared, Ring<S::stages> ring, const ptx::TensorMap& weight,
                                        const ptx::TensorMap& codes, const Problem& p, const Schedule<S>& schedule) {
    const u32 code_bytes = S::cluster * p.box_rows * STEP;
    for (int index = schedule.first(); index < schedule.tiles; index += schedule.stride()) {
        const Tile tile = schedule.at(index, p.rows);
        const int strip = tile.feature / 16, token = tile.token + schedule.rank * p.box_rows;  // this block's share
        const bool inside = tile.feature < p.features;  // else only activations are fetched, for the cluster
        for (int step = 0; step < p.k_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ring.empty_barrier(), ring.parity ^ 1);
            const u32 barrier = ring.full_barrier(), weights = shared + ring.stage * S::stage_bytes;
            const u32 share = weights + S::weight_bytes + schedule.rank * p.box_rows * STEP;
            ptx::mbarrier_arrive_expect(barrier, code_bytes + (inside ? S::weight_bytes : 0));
            if (inside) ptx::tma_load_2d(weights, weight, step * (1024 / 4), strip, barrier);
            if constexpr (S::cluster == 1) {
                ptx::tma_load_2d(share, codes, step * STEP, token, barrier);
            } else {
                ptx::tma_load_2d_multicast(share, codes, step * STEP, token, barrier, (1 << S::cluster) - 1);
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
__device__ __forceinline__ void multiply(int (&sums)[S::strips][S::registers], u32 shared, Ring<S::stages>& ring,
                                         int k_steps) {
    const u32 own = own_weights<S::strips>();
    u32 a[4][S::strips][4] = {};
    PackedWeights<S::strips> packed;
    u32 previous = 0;
    for (int step = 0; step < k_steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(ring.full_barrier(), ring.parity);
        const u32 stage = shared + ring.stage * S::stage_bytes;
        const u64 codes = ptx::wgmma_descriptor(stage + S::weight_bytes);
        packed.load(stage + own);
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
            ptx::wgmma_wait<1>();
            if (half > 0 && step > 0) release<S::cluster>(previous);
#pragma unroll
            for (int i = half; i < half + 2; ++i)
#pragma unroll
                for (int m = 0; m < S::strips; ++m) {
                    ptx::keep_registers(a[i][m]);
                    packed.unpack(a[i][m], m, i);
                    ptx::keep_registers(a[i][m]);
                }
            ptx::wgmma_fence();
#pragma unroll
            for (int i = half; i < half + 2; ++i)
#pragma unroll
                for (int m = 0; m < S::strips; ++m) ptx::wgmma_s8(sums[m], a[i][m], codes + 2 * i, step + i > 0);
            ptx::wgmma_commit();
        }
        previous = ring.empty_barrier();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < S::strips; ++m) ptx::keep_registers(sums[m]);
    release<S::cluster>(previous);
}

// Sums of one tile with a scale for each group of 128 along K, which is one stage. Two sets of sums take turns: while
// the tensor cores fill one, the other is scaled and added to `values`. `scale` points to this thread's two features.
template <class S>
__device__ __forceinline__ void multiply_grouped(float (&values)[S::registers], u32 shared, Ring<S::stages>& ring,
                                                 int groups, const float* (&scale)[2]) {
    const u32 own = own_weights<1>();
    int sums[2][S::registers];
    u32 a[4][4] = {};
    auto start = [&](int set) {
        ptx::mbarrier_wait(ring.full_barrier(), ring.parity);
        const u32 stage = shared + ring.stage * S::stage_bytes;
        const u64 codes = ptx::wgmma_descriptor(stage + S::weight_bytes);
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
        release<S::cluster>(stage_read);
        const float factor[2] = {__ldg(scale[0] + group), __ldg(scale[1] + group)};
#pragma unroll
        for (int i = 0; i < S::registers; ++i)
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
    for (int i = 0; i < S::registers; ++i) values[i] = 0.f;
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
__device__ __forceinline__ void consume(unsigned char* memory, u32 shared, Ring<S::stages>& ring,
                                        const ptx::TensorMap& out, const Problem& p, const Schedule<S>& schedule,
                                        int warpgroup) {
    const u32 scales = S::scale + warpgroup * S::scales * 4;
    const float* row_scale = reinterpret_cast<const float*>(memory + scales);
    const u32 staging = shared + S::staging + warpgroup * S::staging_bytes;
    const int barrier = 1 + warpgroup;
    int chunk = 0;
    for (int index = schedule.first(); index < schedule.tiles; index += schedule.stride()) {
        const Tile tile = schedule.at(index, p.rows);
        const int token = tile.token, feature = tile.feature + warpgroup * S::strips * 64;
        cuda::std::conditional_t<S::grouped, float, int> sums[S::strips][S::registers];
        fetch_scales<S::strips, S::tokens, S::grouped>(shared + scales, p, token, feature);
        if constexpr (S::grouped) {
            const float* scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int own = feature + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
                scale[h] = p.column_scale + static_cast<long long>(min(own, p.features - 1)) * p.k_steps;
            }
            multiply_grouped<S>(sums[0], shared, ring, p.k_steps, scale);
        } else {
            multiply<S>(sums, shared, ring, p.k_steps);
        }
        ptx::cp_async_wait<0>();
        ptx::named_barrier<WARPGROUP>(barrier);  // the scales have arrived
#pragma unroll
        for (int m = 0; m < S::strips; ++m) {
            const Scaling scaling(S::grouped ? nullptr : row_scale + S::tokens + 64 * m, p, feature + 64 * m);
            write<S::tokens>(sums[m], row_scale, scaling, staging, chunk, p, out, token, feature + 64 * m, barrier);
        }
        ptx::named_barrier<WARPGROUP>(barrier);  // the scales have been read
    }
    if (threadIdx.x % WARPGROUP == 0) ptx::tma_store_wait();
}

template <int Consumers, int Strips, int Tokens, int Stages, int Cluster, bool Grouped>
__global__ void __cluster_dims__(Cluster, 1, 1) __launch_bounds__((Consumers + 1) * WARPGROUP, 1)
    w4_gemm(const __grid_constant__ ptx::TensorMap weight, const __grid_constant__ ptx::TensorMap codes,
            const __grid_constant__ ptx::TensorMap out, const __grid_constant__ Problem p) {
    using S = Shape<Consumers, Strips, Tokens, Stages, Cluster, Grouped>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = ptx::shared_address(memory);
    Ring<Stages> ring{shared + S::barriers, shared + S::barriers + 8 * Stages};
    const int warpgroup = threadIdx.x / WARPGROUP;
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
        if constexpr (S::moves_registers) ptx::registers_shrink<24>();
        if (threadIdx.x == Consumers * WARPGROUP) produce<S>(shared, ring, weight, codes, p, schedule);
        __syncwarp();
    } else {
        if constexpr (S::moves_registers) ptx::registers_grow<S::consumer_registers>();
        consume<S>(memory, shared, ring, out, p, schedule, warpgroup);
    }
    if constexpr (Cluster > 1) ptx::cluster_sync();  // a block's memory stays while others write to it
}

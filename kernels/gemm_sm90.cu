// W4A4 and W4A8 matrix product on Hopper (sm_90a): int8 warpgroup instructions on weights that stay 4-bit until they
// are in registers, exact int32 sums, scales applied once at the end (QuaRot Sec. 4, stage 2a, App. A.10).
//
// The product is computed transposed, out[feature, token], since only the first operand may come from registers and
// only weights need unpacking on the way. A nibble moved to the high half of a byte is its value times 16, so sums are
// 16 times too large, which the scale of a row undoes exactly.
//
// One block per multiprocessor. A warp of the last warpgroup fills a ring of shared-memory stages (128 of K each)
// through the copy engine; the other warpgroups multiply, each 64 x Strips features by Tokens tokens. Blocks of a cluster hold
// neighbouring features of the same tokens and fetch the activations for one another (multicast).

#include <cuda/std/type_traits>

#include "gemm.cuh"
#include "wgmma.cuh"

constexpr int STEP = 128;  // of K, in one stage
constexpr int WARPGROUP = 128;
constexpr int CHUNK = 64;  // tokens that leave through the copy engine at a time
#ifndef SKEW
#define SKEW 0
#endif

// Sizes and offsets of one instance, in bytes of dynamic shared memory.
template <int Consumers, int Strips, int Tokens, int Stages, int Cluster>
struct Shape {
    static constexpr int threads = (Consumers + 1) * WARPGROUP;
    static constexpr int consumer_registers = Consumers == 2 ? 240 : 160;  // with 24 for each producer: all there are
    static constexpr int features = Consumers * Strips * 64;
    static constexpr int weight_bytes = features * STEP / 2;
    static constexpr int code_bytes = Tokens * STEP;
    static constexpr int stage_bytes = weight_bytes + code_bytes;
    static constexpr int staging_bytes = 2 * CHUNK * 128;  // of one warpgroup: rows of 64 features of 2 bytes
    static constexpr int scales = Tokens + Strips * 64;          // floats of one warpgroup
    static constexpr int staging = Stages * stage_bytes;
    static constexpr int scale = staging + Consumers * staging_bytes;
    static constexpr int barriers = scale + Consumers * scales * 4;
    static constexpr int sum_registers = Tokens / 2;
};

template <auto Value>
using constant = cuda::std::integral_constant<decltype(Value), Value>;

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

template <class S, int Stages, int Tokens, int Cluster>
__device__ __forceinline__ void produce(u32 shared, Ring<Stages> ring, const ptx::TensorMap& weight,
                                        const ptx::TensorMap& codes, const Problem& p, int tiles, int token_tiles,
                                        int feature_tiles, int rank) {
    for (int index = blockIdx.x / Cluster; index < tiles; index += gridDim.x / Cluster) {
        const Tile tile = tile_at(index, token_tiles, feature_tiles);
        const int strip = (tile.feature * Cluster + rank) * (S::features / 16);
        const int token = tile.token * Tokens + rank * (Tokens / Cluster);
        for (int step = 0; step < p.k_steps; ++step, ring.advance()) {
            ptx::mbarrier_wait(ring.empty_barrier(), ring.parity ^ 1);
            const u32 barrier = ring.full_barrier();
            const u32 weights = shared + ring.stage * S::stage_bytes;
            const u32 share = weights + S::weight_bytes + rank * (S::code_bytes / Cluster);
            ptx::mbarrier_arrive_expect(barrier, S::stage_bytes);
            ptx::tma_load_2d(weights, weight, step * (STEP * 16 / 2 / 4), strip, barrier);
            if constexpr (Cluster == 1) {
                ptx::tma_load_2d(share, codes, step * STEP, token, barrier);
            } else {
                ptx::tma_load_2d_multicast(share, codes, step * STEP, token, barrier, (1 << Cluster) - 1);
            }
        }
    }
}

// Sums of one tile. Two sets of operand registers take turns: one is unpacked while instructions read the other.
template <class S, int Strips, int Tokens, int Stages, int Cluster>
__device__ __forceinline__ void multiply(int (&sums)[Strips][S::sum_registers], u32 shared, Ring<Stages>& ring,
                                         int k_steps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // warp 4 w + i: warpgroup w
    const u32 own = (warp / 4 * Strips * 4 + warp % 4) * 1024 + lane * 16;
    u32 a[2][Strips][2][4] = {};
    u32 previous = 0;
    for (int step = 0; step < k_steps; ++step, ring.advance()) {
        ptx::mbarrier_wait(ring.full_barrier(), ring.parity);
        const u32 stage = shared + ring.stage * S::stage_bytes;
        const u64 codes = ptx::wgmma_descriptor(stage + S::weight_bytes);
        uint4 packed[2][Strips];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int m = 0; m < Strips; ++m) packed[half][m] = ptx::load_shared_16(stage + own + m * 4096 + half * 512);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            ptx::wgmma_wait<1>();
            if (half == 1 && step > 0) release<Cluster>(previous);
#pragma unroll
            for (int m = 0; m < Strips; ++m) {
                ptx::keep_registers(a[half][m][0]);
                ptx::keep_registers(a[half][m][1]);
                unpack_weights(a[half][m], packed[half][m]);
                ptx::keep_registers(a[half][m][0]);
                ptx::keep_registers(a[half][m][1]);
            }
            ptx::wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int m = 0; m < Strips; ++m)
                    ptx::wgmma_s8(sums[m], a[half][m][i], codes + 2 * (2 * half + i), step + half + i > 0);
            ptx::wgmma_commit();
        }
        previous = ring.empty_barrier();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < Strips; ++m) ptx::keep_registers(sums[m]);
    release<Cluster>(previous);
}

// Sums of one tile with a scale for each group of 128 along K, which is one stage: its int32 sums are scaled and added
// to `values` while other warpgroups keep the tensor cores busy. `scale` points to the scales of this thread's features.
template <class S, int Tokens, int Stages, int Cluster>
__device__ __forceinline__ void multiply_grouped(float (&values)[S::sum_registers], u32 shared, Ring<Stages>& ring,
                                                 int groups, const float* (&scale)[2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 own = warp * 1024 + lane * 16;
    int sums[S::sum_registers];
    u32 a[2][2][4];
#pragma unroll
    for (int i = 0; i < S::sum_registers; ++i) values[i] = 0.f;
    for (int group = 0; group < groups; ++group, ring.advance()) {
        const float factor[2] = {__ldg(scale[0] + group), __ldg(scale[1] + group)};
        ptx::mbarrier_wait(ring.full_barrier(), ring.parity);
        const u32 stage = shared + ring.stage * S::stage_bytes;
        const u64 codes = ptx::wgmma_descriptor(stage + S::weight_bytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unpack_weights(a[half], ptx::load_shared_16(stage + own + half * 512));
            ptx::keep_registers(a[half][0]);
            ptx::keep_registers(a[half][1]);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) ptx::wgmma_s8(sums, a[i / 2][i % 2], codes + 2 * i, i > 0);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::keep_registers(sums);
        release<Cluster>(ring.empty_barrier());
#pragma unroll
        for (int i = 0; i < S::sum_registers; ++i)
            values[i] = __fmaf_rn(__int2float_rn(sums[i]), factor[i / 2 % 2], values[i]);
    }
}

// Fetch the scales of a tile into the warpgroup's shared memory; they arrive while it multiplies.
template <class S, int Strips, int Tokens, bool Grouped>
__device__ __forceinline__ void fetch_scales(u32 scales, const Problem& p, int token, int feature) {
    for (int i = threadIdx.x % WARPGROUP; i < Tokens; i += WARPGROUP) {
        const bool valid = token + i < p.rows;
        ptx::cp_async_4(scales + 4 * i, p.row_scale + (valid ? (token + i) * p.row_scale_stride : 0), valid);
    }
    const int i = threadIdx.x % WARPGROUP;
    if (!Grouped && i < Strips * 64) {
        const bool valid = feature + i < p.features;
        ptx::cp_async_4(scales + 4 * (Tokens + i), p.column_scale + (valid ? feature + i : 0), valid);
    }
    ptx::cp_async_commit();
}

// Scales and biases of one thread's two features; `column` contains the 1/16 that sums are too large by.
struct Scaling {
    float column[2], bias[2];

    // `column_scale` null: the sums contain it.
    __device__ __forceinline__ Scaling(const float* column_scale, const Problem& p, int feature) {
        const int own = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            column[h] = 0.0625f * (column_scale == nullptr ? 1.f : column_scale[own + 8 * h]);
            bias[h] = bias_at(p, feature + own + 8 * h);
        }
    }
    // Row scale first, each product rounded: sixteenths are exact, so this is the order of the definition.
    template <bool Bias, typename T>
    __device__ __forceinline__ float value(T sum, float row, int h) const {
        const float y = __fmul_rn(__fmul_rn(static_cast<float>(sum), row), column[h]);
        return Bias ? __fadd_rn(y, bias[h]) : y;
    }
};

// Write 64 features by Tokens tokens of a 16-bit output in chunks: transposed on the way to shared memory, from there
// by the copy engine. Two buffers take turns, of which `chunk` counts the uses.
template <int Tokens, int Type, bool Bias, typename T>
__device__ __forceinline__ void write_staged(const T (&sums)[Tokens / 2], const float* row_scale,
                                             const Scaling& scaling, u32 staging, int& chunk, const Problem& p,
                                             const ptx::TensorMap& out, int token, int feature, int barrier) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    // Lane l addresses row l % 8 (a token) of the 8x8 matrix l / 8: features h = l / 8 % 2, tokens 8 (j + l / 16).
    const u32 row = (8 * (lane / 16) + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
#pragma unroll
    for (int first = 0; first < Tokens / 8; first += CHUNK / 8, ++chunk) {
        const u32 buffer = staging + chunk % 2 * (CHUNK * 128);
        if (leader) ptx::tma_store_wait_read<1>();
        ptx::named_barrier<WARPGROUP>(barrier);
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2) {
            u32 words[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 scale = *reinterpret_cast<const float2*>(row_scale + 8 * (first + j + n) + lane % 4 * 2);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int at = 4 * (first + j + n) + 2 * h;
                    words[2 * n + h] = pack_pair(scaling.value<Bias>(sums[at], scale.x, h),
                                                 scaling.value<Bias>(sums[at + 1], scale.y, h), Type);
                }
            }
            ptx::stmatrix_x4_trans(buffer + row + 8 * j * 128, words[0], words[1], words[2], words[3]);
        }
        ptx::fence_async_shared();
        ptx::named_barrier<WARPGROUP>(barrier);
        if (leader) {
            if (feature < p.features && token + 8 * first < p.rows) {
                ptx::tma_store_2d(out, buffer, feature, token + 8 * first);
            }
            ptx::tma_store_commit();  // also when empty: the wait above counts groups
        }
    }
}

// The same for any output, element by element.
template <int Tokens, typename T>
__device__ __forceinline__ void write_direct(const T (&sums)[Tokens / 2], const float* row_scale,
                                             const Scaling& scaling, const Problem& p, int token, int feature) {
    const int lane = threadIdx.x % 32, own = feature + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int size = p.type == FLOAT ? 4 : 2;
    const long long pitch = static_cast<long long>(p.features) * size;
    token += lane % 4 * 2;
    row_scale += lane % 4 * 2;
    unsigned char* at = static_cast<unsigned char*>(p.out) + token * pitch + static_cast<long long>(own) * size;
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (token + i < p.rows && own + 8 * h < p.features) {
                    const float value = scaling.value<true>(sums[4 * j + 2 * h + i], row_scale[i], h);
                    store_one(at + i * pitch + 8 * h * size, value, p.type);
                }
            }
        }
        at += 8 * pitch, token += 8, row_scale += 8;
        asm volatile("" : "+l"(at), "+r"(token), "+l"(row_scale));  // else all addresses are computed first, and spill
    }
}

template <int Consumers, int Strips, int Tokens, int Stages, int Cluster, bool Grouped>
__global__ void __cluster_dims__(Cluster, 1, 1) __launch_bounds__((Consumers + 1) * WARPGROUP, 1)
    w4_gemm(const __grid_constant__ ptx::TensorMap weight, const __grid_constant__ ptx::TensorMap codes,
            const __grid_constant__ ptx::TensorMap out, const __grid_constant__ Problem p) {
    using S = Shape<Consumers, Strips, Tokens, Stages, Cluster>;
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = ptx::shared_address(memory);
    Ring<Stages> ring{shared + S::barriers, shared + S::barriers + 8 * Stages};
    const int rank = Cluster == 1 ? 0 : ptx::cluster_rank();
    const int warpgroup = threadIdx.x / WARPGROUP;
    const int token_tiles = (p.rows + Tokens - 1) / Tokens;
    const int feature_tiles = (p.features + S::features * Cluster - 1) / (S::features * Cluster);
    const int tiles = token_tiles * feature_tiles;

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
        ptx::registers_shrink<24>();
        if (threadIdx.x == Consumers * WARPGROUP) {
            produce<S, Stages, Tokens, Cluster>(shared, ring, weight, codes, p, tiles, token_tiles, feature_tiles, rank);
        }
        __syncwarp();
    } else {
        ptx::registers_grow<S::consumer_registers>();
        const u32 scales = S::scale + warpgroup * S::scales * 4;
        const float* row_scale = reinterpret_cast<const float*>(memory + scales);
        const u32 staging = shared + S::staging + warpgroup * S::staging_bytes;
        const int barrier = 1 + warpgroup;
        int chunk = 0;
#if SKEW
        if (warpgroup > 0 && tiles > gridDim.x / Cluster) {
            ptx::mbarrier_wait(ring.full_barrier(), ring.parity);
            const long long start = clock64();
            while (clock64() - start < warpgroup * SKEW) {
            }
        }
#endif
        for (int index = blockIdx.x / Cluster; index < tiles; index += gridDim.x / Cluster) {
            const Tile tile = tile_at(index, token_tiles, feature_tiles);
            const int token = tile.token * Tokens;
            const int feature = ((tile.feature * Cluster + rank) * Consumers + warpgroup) * Strips * 64;
            cuda::std::conditional_t<Grouped, float, int> sums[Strips][S::sum_registers];
            fetch_scales<S, Strips, Tokens, Grouped>(shared + scales, p, token, feature);
            if constexpr (Grouped) {
                const float* scale[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int own = feature + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
                    scale[h] = p.column_scale + static_cast<long long>(min(own, p.features - 1)) * p.k_steps;
                }
                multiply_grouped<S, Tokens, Stages, Cluster>(sums[0], shared, ring, p.k_steps, scale);
            } else {
                multiply<S, Strips, Tokens, Stages, Cluster>(sums, shared, ring, p.k_steps);
            }
            ptx::cp_async_wait<0>();
            ptx::named_barrier<WARPGROUP>(barrier);  // the scales have arrived
#pragma unroll
            for (int m = 0; m < Strips; ++m) {
                const Scaling scaling(Grouped ? nullptr : row_scale + Tokens + 64 * m, p, feature + 64 * m);
                auto write = [&](auto type, auto bias) {
                    write_staged<Tokens, type.value, bias.value>(sums[m], row_scale, scaling, staging, chunk, p, out,
                                                                 token, feature + 64 * m, barrier);
                };
                if (!p.tensor_store) {
                    write_direct<Tokens>(sums[m], row_scale, scaling, p, token, feature + 64 * m);
                } else if (p.type == HALF) {
                    p.bias == nullptr ? write(constant<HALF>{}, constant<false>{})
                                      : write(constant<HALF>{}, constant<true>{});
                } else {
                    p.bias == nullptr ? write(constant<BFLOAT16>{}, constant<false>{})
                                      : write(constant<BFLOAT16>{}, constant<true>{});
                }
            }
            ptx::named_barrier<WARPGROUP>(barrier);  // the scales have been read
        }
        if (threadIdx.x % WARPGROUP == 0) ptx::tma_store_wait();
    }
    if constexpr (Cluster > 1) ptx::cluster_sync();
}

// Products of a 4-bit weight with 1 to 64 rows of 16-bit activations, and the weight itself in 16 bits for more rows.
//
// The weight's bytes bound few rows, so they stream as in gemv.cu, in the same order (rotquant/kernels/layouts/weights.py).
// Codes become exact 16-bit integers by a mask and an addition, since 1024 + q is a float16 whose lowest bits are q, and
// 128 + q a bfloat16; tensor cores sum their products with the activations in float32; scales multiply the sums of each
// stage of 128 inputs. So no weight is ever rounded, and every order of additions is fixed.
// On sm_90a warpgroups can multiply: their instructions take activations from shared memory, once for 64 features.
// Architectures: sm_80 and newer; clusters on sm_90 and newer; warpgroups on sm_90a.
#include "values/element.cuh"
#include "gemv/product.cuh"
#include "mma/warp.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "mma/warpgroup_rows.cuh"
#endif

// A of m16n8k16, and a warp's share of A of m64nNk16: features (g, g + 8, g, g + 8), the first two at k 2t and 2t + 1,
// the others 8 later. The host interleaves the two eights of each 16 inputs, so that they are bytes 0 and 2 of a lane's
// word, and bytes 1 and 3.
using Fragment = u32[4];

// What differs between the types: codes -8..7 in the low or the high four bits of a word's two halves as a pair of
// numbers.
template <class T>
struct Half;

template <>
struct Half<__half> {
    static __device__ __forceinline__ u32 low_codes(u32 word) {  // 1024 + 8 + q, less 1032
        return ptx::fma_f16x2(ptx::masked_xor(word, 0x000F000Fu, 0x64086408u), 0x3C003C00u, 0xE408E408u);
    }
    static __device__ __forceinline__ u32 high_codes(u32 word) {  // (1024 + 16 (8 + q)) / 16, less 72
        return ptx::fma_f16x2(ptx::masked_xor(word, 0x00F000F0u, 0x64806480u), 0x2C002C00u, 0xD480D480u);
    }
};

template <>
struct Half<__nv_bfloat16> {
    static __device__ __forceinline__ u32 low_codes(u32 word) {  // 128 + 8 + q, less 136
        return ptx::fma_bf16x2(ptx::masked_xor(word, 0x000F000Fu, 0x43084308u), 0x3F803F80u, 0xC308C308u);
    }
    static __device__ __forceinline__ u32 high_codes(u32 word) { return low_codes(word >> 4); }
};

// Two of a lane's words, of features g and g + 8, as operands of 16 inputs and the next 16.
template <class T>
__device__ __forceinline__ void unpack(Fragment* a, u32 top, u32 bottom) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 pair = (i % 2 ? bottom : top) >> (i < 2 ? 0 : 8);
        a[0][i] = Half<T>::low_codes(pair);
        a[1][i] = Half<T>::high_codes(pair);
    }
}

template <class S, class T>
struct HalfAccumulator : Totals<S, float> {
    // Steps are outermost, so that a tile's instruction seldom waits for the one before it.
    __device__ __forceinline__ void stage(const Ring<S>& ring, int index) {
        float sums[S::kTiles][S::kStrips][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Fragment a[S::kStrips][4];
#pragma unroll
            for (int strip = 0; strip < S::kStrips; ++strip) {
                u32 words[4];
                ptx::load_shared_16(words, ring.weight_slot(index, strip, half));
                unpack<T>(a[strip], words[0], words[1]);
                unpack<T>(a[strip] + 2, words[2], words[3]);
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#pragma unroll
                for (int tile = 0; tile < S::kTiles; ++tile) {
                    u32 b[4];  // of two steps
                    ptx::ldmatrix_x4(b, ring.activation_address(index, tile, 8 * half + 4 * pair + ring.lane / 8));
#pragma unroll
                    for (int step = 0; step < 2; ++step)
#pragma unroll
                        for (int strip = 0; strip < S::kStrips; ++strip)
                            ptx::mma_m16n8k16<T>(sums[tile][strip], a[strip][2 * pair + step], b[2 * step],
                                                 b[2 * step + 1]);
                }
        }
        this->add_scaled(0, sums, ring, index);
    }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The strips of four neighbouring warps are A of one instruction; what features they are does not matter to it.
template <class S, class T>
struct WarpgroupAccumulator : Totals<S, float> {
    static_assert(S::kAcross % 4 == 0 && S::kRows % 16 == 0 && S::kGroupBytes % 1024 == 0);
    Fragment a[3][S::kStrips][2];  // of three quarters of a stage

    // A lane reads what it copied itself, so half of the weights can be unpacked while other warps still multiply.
    __device__ __forceinline__ void prepare(const Ring<S>& ring, int index) {
        u32 words[S::kStrips][4];
        ptx::fence_async_shared();
        load(words, ring, index, 0);
        unpack_quarter(0, words, 0);
        unpack_quarter(1, words, 2);
    }

    // Instructions run while the next quarter is unpacked.
    __device__ __forceinline__ void stage(const Ring<S>& ring, int index) {
        float sums[S::kTiles][S::kStrips][4];
        u32 words[S::kStrips][4];
        const u64 first = ptx::wgmma_descriptor(ring.activation_slot(index)), second = first + S::kRows * 128 / 16;
        ptx::wgmma_fence();
        multiply(sums, 0, first, 0);
        multiply(sums, 1, first + 4, 1);
        ptx::wgmma_commit();
        load(words, ring, index, 1);
        unpack_quarter(2, words, 0);
        ptx::wgmma_fence();
        multiply(sums, 2, second, 1);
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip) ptx::keep_registers(words[strip]);
        unpack_quarter(0, words, 2);  // whose first use is over
        ptx::wgmma_fence();
        multiply(sums, 0, second + 4, 1);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::keep_sums(sums);
        this->add_scaled(0, sums, ring, index);
    }

    __device__ __forceinline__ static void load(u32 (&words)[S::kStrips][4], const Ring<S>& ring, int index, int half) {
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip)
            ptx::load_shared_16(words[strip], ring.weight_slot(index, strip, half));
    }

    __device__ __forceinline__ void unpack_quarter(int to, const u32 (&words)[S::kStrips][4], int word) {
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip)
            unpack<T>(a[to][strip], words[strip][word], words[strip][word + 1]);
    }

    // Two steps of 16 inputs, 32 bytes each, which descriptors count in units of 16.
    __device__ __forceinline__ void multiply(float (&sums)[S::kTiles][S::kStrips][4], int from, u64 rows, int add) {
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
            for (int strip = 0; strip < S::kStrips; ++strip)
                ptx::wgmma_rows<T>(sums, strip, a[from][strip][step], rows + 2 * step, add || step > 0);
    }
};
#endif

// Sums have their scales already.
struct Scaled {
    __device__ __forceinline__ explicit Scaled(void*) {}
    __device__ __forceinline__ void load_columns(const Problem&, int) const {}
    __device__ __forceinline__ void load_rows(const Problem&) const {}
    __device__ __forceinline__ float apply(float sum, int, int) const { return sum; }
};

// Blocks that must fit a multiprocessor at once, so that the compiler keeps to 64, 128 or 255 registers a thread.
constexpr int resident_blocks(int rows, int strips, int threads) {
    const int sums = (rows + 7) / 8 * strips;  // sets of 4 of a stage, and as many of all
    const int warps = sums == 1 ? 32 : sums < 8 ? 16 : 8;
    return warps * 32 > threads ? warps * 32 / threads : 1;
}

template <class T, int Rows, int Strips, int Across, int Along, int Depth>
__global__ void __launch_bounds__(32 * Across * Along, resident_blocks(Rows, Strips, 32 * Across * Along))
    w4a16(const __grid_constant__ Problem problem) {
    using S = Shape<Rows, Strips, Across, Along, Depth, 1, 16, true>;
    product<S, HalfAccumulator<S, T>, Scaled>(problem);
}

#if __CUDA_ARCH__ >= 900
template <class T, int Rows, int Strips, int Across, int Along, int Depth, int Cluster>
__global__ void __launch_bounds__(32 * Across * Along, resident_blocks(Rows, Strips, 32 * Across * Along))
    __cluster_dims__(Cluster, 1, 1) w4a16_cluster(const __grid_constant__ Problem problem) {
    using S = Shape<Rows, Strips, Across, Along, Depth, Cluster, 16, true>;
    product<S, HalfAccumulator<S, T>, Scaled>(problem);
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Blocks that fit a multiprocessor at once, as far as they have room for 128 registers a thread.
template <class S>
constexpr int warpgroup_blocks() {
    const int by_registers = 512 / S::kThreads, by_memory = 227 * 1024 / (S::kSharedBytes + 1024);
    return by_registers < by_memory ? (by_registers > 1 ? by_registers : 1) : (by_memory > 1 ? by_memory : 1);
}

template <class T, int Rows, int Strips, int Across, int Along, int Depth, int Cluster>
__global__ void __launch_bounds__(32 * Across * Along,
                                  warpgroup_blocks<Shape<Rows, Strips, Across, Along, Depth, Cluster, 16, true>>())
    __cluster_dims__(Cluster, 1, 1) w4a16_warpgroups(const __grid_constant__ Problem problem) {
    using S = Shape<Rows, Strips, Across, Along, Depth, Cluster, 16, true>;
    product<S, WarpgroupAccumulator<S, T>, Scaled>(problem);
}
#endif

// ---- the weight itself ----

constexpr int kDequantizeWarps = 8;

// Two codes times a scale, rounded once.
template <class T>
__device__ __forceinline__ u32 scaled_pair(u32 codes, float scale) {
    const float2 pair = Float16<T>::unpack(codes);
    return Float16<T>::pack(pair.x * scale, pair.y * scale);
}

// [strips * 16, inner] of T, for many rows, where a library's product is faster. A warp per strip and 64 inputs.
template <class T>
__global__ void __launch_bounds__(32 * kDequantizeWarps)
    w4a16_dequantize(const uint4* codes, const float* scale, T* out, int strips, int features, int inner,
                     int group_step) {
    const int k_blocks = (inner + kBlockK - 1) / kBlockK;
    const int index = (blockIdx.x * 32 * kDequantizeWarps + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int strip = index / k_blocks, block = index % k_blocks;
    if (strip >= strips) return;
    const uint4 raw = codes[static_cast<size_t>(index) * 32 + lane];
    Fragment a[4];
    unpack<T>(a, raw.x, raw.y);
    unpack<T>(a + 2, raw.z, raw.w);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int feature = strip * kStrip + lane / 4 + 8 * half;
        const float s = scale[static_cast<size_t>(block * kBlockK / kStageK) * group_step + min(feature, features - 1)];
        T* row = out + static_cast<size_t>(feature) * inner;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            // Neighbouring lanes trade pairs, and have four inputs each: the even one of the first eight.
            const u32 pairs[2] = {scaled_pair<T>(a[step][half], s), scaled_pair<T>(a[step][half + 2], s)};
            const int odd = lane % 2;
            const u32 other = __shfl_xor_sync(0xFFFFFFFFu, pairs[1 - odd], 1);
            const int k = block * kBlockK + 16 * step + 8 * odd + lane % 4 / 2 * 4;
            if (feature >= features || k >= inner) continue;
            const uint2 four = odd ? uint2{other, pairs[1]} : uint2{pairs[0], other};
            *reinterpret_cast<uint2*>(row + k) = four;
        }
    }
}

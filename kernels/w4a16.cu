// Products of a 4-bit weight with 1 to 64 rows of 16-bit activations, and the weight itself in 16 bits for more rows.
//
// The weight's bytes bound few rows, so they stream as in gemv.cu, in the same order (rotquant/kernels/layouts/weights.py).
// Codes become exact 16-bit integers by a mask and an addition, since 1024 + q is a float16 whose lowest bits are q, and
// 128 + q a bfloat16; tensor cores sum their products with the activations in float32; scales multiply the sums of each
// stage of 128 inputs. So no weight is ever rounded, and every order of additions is fixed.
// Architectures: sm_80 and newer; clusters on sm_90 and newer.
#include "element.cuh"
#include "gemv_product.cuh"

// A of m16n8k16: features (g, g + 8, g, g + 8), the first two at k 4t and 4t + 1, the others at 4t + 2 and 4t + 3. The
// tensor core calls them 2t, 2t + 1, 2t + 8, 2t + 9, and does not mind as long as B has the same order.
using Fragment = u32[4];

// Bytes (0, 1) or (2, 3) of a word in the lower bytes of its halves.
__device__ __forceinline__ u32 first_bytes(u32 word) { return __byte_perm(word, 0, 0x4140); }
__device__ __forceinline__ u32 last_bytes(u32 word) { return __byte_perm(word, 0, 0x4342); }

// What differs between the types: codes -8..7 in the low or the high four bits of a word's two halves as a pair of
// numbers, and the product of tensor cores.
template <class T>
struct Half;

template <>
struct Half<__half> {
    static __device__ __forceinline__ u32 low_codes(u32 word) {  // 1024 + 8 + q, less 1032
        return ptx::fma_f16x2((word & 0x000F000Fu) ^ 0x64086408u, 0x3C003C00u, 0xE408E408u);
    }
    static __device__ __forceinline__ u32 high_codes(u32 word) {  // (1024 + 16 (8 + q)) / 16, less 72
        return ptx::fma_f16x2((word & 0x00F000F0u) ^ 0x64806480u, 0x2C002C00u, 0xD480D480u);
    }
    static __device__ __forceinline__ void multiply(float (&d)[4], const Fragment& a, const u32 (&b)[2]) {
        ptx::mma_m16n8k16_f16(d, a[0], a[1], a[2], a[3], b[0], b[1]);
    }
};

template <>
struct Half<__nv_bfloat16> {
    static __device__ __forceinline__ u32 low_codes(u32 word) {  // 128 + 8 + q, less 136
        return ptx::fma_bf16x2((word & 0x000F000Fu) ^ 0x43084308u, 0x3F803F80u, 0xC308C308u);
    }
    static __device__ __forceinline__ u32 high_codes(u32 word) { return low_codes(word >> 4); }
    static __device__ __forceinline__ void multiply(float (&d)[4], const Fragment& a, const u32 (&b)[2]) {
        ptx::mma_m16n8k16_bf16(d, a[0], a[1], a[2], a[3], b[0], b[1]);
    }
};

// A lane's 16 bytes of a strip, 64 inputs, as four operands of 16.
template <class T>
__device__ __forceinline__ void make_fragments(Fragment* a, const u32 (&words)[4]) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const u32 top = words[2 * part], bottom = words[2 * part + 1];
        const u32 pairs[4] = {first_bytes(top), first_bytes(bottom), last_bytes(top), last_bytes(bottom)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[2 * part][i] = Half<T>::low_codes(pairs[i]);
            a[2 * part + 1][i] = Half<T>::high_codes(pairs[i]);
        }
    }
}

template <class S, class T>
struct HalfAccumulator : Totals<S, float> {
    // Steps are outermost, so that a tile's instruction never waits for the one before it.
    __device__ __forceinline__ void stage(const Ring<S>& ring, int index) {
        float sums[S::kTiles][S::kStrips][4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Fragment a[S::kStrips][4];
#pragma unroll
            for (int strip = 0; strip < S::kStrips; ++strip) {
                u32 words[4];
                ptx::load_shared_16(words, ring.weight_slot(index, strip, half));
                make_fragments<T>(a[strip], words);
            }
#pragma unroll
            for (int step = 0; step < 4; ++step)
#pragma unroll
                for (int tile = 0; tile < S::kTiles; ++tile) {
                    u32 b[2];
                    ptx::load_shared_8(b, row_address(ring, index, tile, 4 * half + step));
#pragma unroll
                    for (int strip = 0; strip < S::kStrips; ++strip)
                        Half<T>::multiply(sums[tile][strip], a[strip][step], b);
                }
        }
        this->add_scaled(0, sums, ring, index);
    }

    // Where this lane's four inputs of a step lie: of row g of the tile, inputs 4t to 4t + 3. A capacity below 8 repeats
    // its last row: columns that nobody stores.
    static __device__ __forceinline__ u32 row_address(const Ring<S>& ring, int index, int tile, int step) {
        const int t = ring.lane % 4, row = tile * 8 + min(ring.lane / 4, S::kRows - 1);
        return ring.activation_slot(index) + activation_offset<S>(row, 2 * step + t / 2) + t % 2 * 8;
    }
};

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
    const int warps = sums == 1 ? 32 : sums <= 8 ? 16 : 8;
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
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
    Fragment a[4];
    make_fragments<T>(a, words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int feature = strip * kStrip + lane / 4 + 8 * half;
        if (feature >= features) continue;
        const float s = scale[static_cast<size_t>(block * kBlockK / kStageK) * group_step + feature];
        T* row = out + static_cast<size_t>(feature) * inner;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const int k = block * kBlockK + 16 * step + lane % 4 * 4;
            if (k >= inner) continue;
            const uint2 four = {scaled_pair<T>(a[step][half], s), scaled_pair<T>(a[step][half + 2], s)};
            *reinterpret_cast<uint2*>(row + k) = four;
        }
    }
}

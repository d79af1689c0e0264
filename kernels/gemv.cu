// Products of a 4-bit weight with 1 to 64 rows of 4- or 8-bit activations (QuaRot Sec. 4, stage 2). The weight's bytes
// bound them, so each is read once, many are always under way, and everything else is arranged around that. Sums are
// exact integers; scales are applied once, in the order that rotquant/kernels/products/linear.py defines.
//
// A strip is 16 output features, a stage 128 input features of it: 1 KB in the order of rotquant/kernels/layouts/weights.py.
// A group of warps that share activations takes every so-many-th stage of its strips through a ring of asynchronous
// copies; the groups of a block, and on Hopper the blocks of a cluster, split the stages and add up at the end.
// Architectures: sm_80 and newer; clusters on sm_90 and newer.
#include "gemv/product.cuh"
#include "mma/warp.cuh"

template <bool Grouped>
struct SumOf {
    using Type = int;
};
template <>
struct SumOf<true> {
    using Type = float;
};

// Sums of a warp: integers, or floats where every stage has a scale of its own.
template <class S>
struct Accumulator : Totals<S, typename SumOf<S::kGrouped>::Type> {
    static constexpr int kTogether = S::kTiles > 1 ? 2 : 1;  // tiles whose instructions do not wait for each other

    __device__ __forceinline__ void stage(const Ring<S>& ring, int index) {
        if constexpr (S::kGrouped)
            stage_of_group(ring, index);
        else
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                WeightFragment a[S::kStrips][2];
#pragma unroll
                for (int strip = 0; strip < S::kStrips; ++strip) ring.weights(a[strip], index, strip, half);
#pragma unroll
                for (int tile = 0; tile < S::kTiles; tile += kTogether) {
                    u32 b[kTogether][4];
                    ring.rows(b, index, tile, half);
                    multiply(&this->values[tile], a, b);
                }
            }
    }

    // A tile's integers must be whole before they are scaled, so tiles are outermost.
    __device__ __forceinline__ void stage_of_group(const Ring<S>& ring, int index) {
        WeightFragment a[2][S::kStrips][2];
#pragma unroll
        for (int strip = 0; strip < S::kStrips; ++strip)
#pragma unroll
            for (int half = 0; half < 2; ++half) ring.weights(a[half][strip], index, strip, half);
#pragma unroll
        for (int tile = 0; tile < S::kTiles; tile += kTogether) {
            Sums sums[kTogether][S::kStrips] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 b[kTogether][4];
                ring.rows(b, index, tile, half);
                multiply(sums, a[half], b);
            }
            this->add_scaled(tile, sums, ring, index);
        }
    }

    // 64 input features; instructions on the same sums stand as far apart as they can.
    static __device__ __forceinline__ void multiply(Sums (*sums)[S::kStrips], const WeightFragment (&a)[S::kStrips][2],
                                                    const u32 (&b)[kTogether][4]) {
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int tile = 0; tile < kTogether; ++tile)
#pragma unroll
                for (int strip = 0; strip < S::kStrips; ++strip)
                    ptx::mma_m16n8k32_s8(sums[tile][strip], a[strip][part], b[tile][2 * part], b[tile][2 * part + 1]);
    }
};

// Row and column scales of a block in shared memory, copied while the weight streams.
template <class S>
struct Scales {
    float* rows;
    float* columns;

    __device__ __forceinline__ explicit Scales(void* shared)
        : rows(static_cast<float*>(shared)), columns(rows + S::kRows) {}

    __device__ __forceinline__ void load_columns(const Problem& p, int first_feature) const {
        if constexpr (S::kGrouped) return;  // they come with their stages
        for (int i = threadIdx.x; i < S::kFeatures; i += S::kThreads)
            if (first_feature + i < p.features)
                ptx::cp_async_4(ptx::shared_address(columns + i), p.column_scale + first_feature + i);
    }

    __device__ __forceinline__ void load_rows(const Problem& p) const {
        for (int i = threadIdx.x; i < p.rows; i += S::kThreads)
            ptx::cp_async_4(ptx::shared_address(rows + i), p.row_scale + i * p.row_scale_step);
    }

    // Each step is rounded on its own: contraction to fused multiply-adds would change the last bit.
    __device__ __forceinline__ float apply(typename Accumulator<S>::Value sum, int row, int column) const {
        if constexpr (S::kGrouped)
            return __fmul_rn(sum * (1.0f / S::kFactor), rows[row]);
        else
            return __fmul_rn(__fmul_rn(__int2float_rn(sum / S::kFactor), rows[row]), columns[column]);
    }
};

// Blocks that must fit a multiprocessor at once, so that the compiler keeps to 64, 128 or 255 registers a thread.
constexpr int resident_blocks(int rows, int strips, int threads, bool grouped) {
    const int sums = (rows + 7) / 8 * strips * (grouped ? 2 : 1);  // sets of 4
    const int warps = sums <= 4 ? 32 : sums <= 16 ? 16 : 8;
    return warps * 32 > threads ? warps * 32 / threads : 1;
}

template <int Rows, int Strips, int Across, int Along, int Depth, bool Packed, bool Grouped>
__global__ void __launch_bounds__(32 * Across * Along, resident_blocks(Rows, Strips, 32 * Across * Along, Grouped))
    gemv(const __grid_constant__ Problem problem) {
    using S = Shape<Rows, Strips, Across, Along, Depth, 1, Packed ? 4 : 8, Grouped>;
    product<S, Accumulator<S>, Scales<S>>(problem);
}

#if __CUDA_ARCH__ >= 900
template <int Rows, int Strips, int Across, int Along, int Depth, int Cluster, bool Packed, bool Grouped>
__global__ void __launch_bounds__(32 * Across * Along, resident_blocks(Rows, Strips, 32 * Across * Along, Grouped))
    __cluster_dims__(Cluster, 1, 1) gemv_cluster(const __grid_constant__ Problem problem) {
    using S = Shape<Rows, Strips, Across, Along, Depth, Cluster, Packed ? 4 : 8, Grouped>;
    product<S, Accumulator<S>, Scales<S>>(problem);
}
#endif

// Sums and maxima over a warp and over a block of whole warps.
#pragma once

struct Maximum {
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

struct Sum {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

template <class Operation>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x = Operation::of(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
    return x;
}

// Over `warps` warps beginning at `first`; the whole block takes part. `scratch`: a float for each warp of the block,
// used once between two barriers of the caller's, or once in all.
template <class Operation>
__device__ __forceinline__ float reduce_warps(float x, float* scratch, int first, int warps) {
    x = warp_reduce<Operation>(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[first];
    for (int w = 1; w < warps; ++w) x = Operation::of(x, scratch[first + w]);
    return x;
}

__device__ __forceinline__ float block_maximum(float x, float* scratch) {
    return reduce_warps<Maximum>(x, scratch, 0, blockDim.x / 32);
}

__device__ __forceinline__ float block_sum(float x, float* scratch) {
    return reduce_warps<Sum>(x, scratch, 0, blockDim.x / 32);
}

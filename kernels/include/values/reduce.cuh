// Sums and maxima over a warp and over a block of whole warps.
#pragma once

struct Maximum {
    static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

struct Sum {
    static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};

// Over so many neighbouring lanes, a power of two.
template <class Operation, int Lanes = 32>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
    for (int mask = Lanes / 2; mask; mask /= 2) x = Operation::of(x, __shfl_xor_sync(0xFFFFFFFFu, x, mask));
    return x;
}

// The largest magnitude of a warp: floats that are not negative are ordered as their bits are.
__device__ __forceinline__ float warp_largest(float magnitude) {
    return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(magnitude)));
}

// The largest magnitude of a block of `Warps` warps; `scratch`: 16-byte aligned, a float for each, as `block_reduce`
// uses it.
template <int Warps>
__device__ __forceinline__ float block_largest(float magnitude, float* scratch) {
    magnitude = warp_largest(magnitude);
    if constexpr (Warps == 1) return magnitude;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = magnitude;
    __syncthreads();
    magnitude = scratch[0];
    if constexpr (Warps % 4 == 0) {
#pragma unroll
        for (int w = 0; w < Warps; w += 4) {
            const float4 x = *reinterpret_cast<const float4*>(scratch + w);
            magnitude = fmaxf(magnitude, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
        }
    } else {
#pragma unroll
        for (int w = 1; w < Warps; ++w) magnitude = fmaxf(magnitude, scratch[w]);
    }
    return magnitude;
}

// The sum over a block of `Warps` warps, `scratch` as above.
template <int Warps>
__device__ __forceinline__ float block_total(float x, float* scratch) {
    x = warp_reduce<Sum>(x);
    if constexpr (Warps == 1) return x;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int w = 1; w < Warps; ++w) x += scratch[w];
    return x;
}

// Over a block of whole warps. `scratch`: a float for each warp, used once between two barriers of the caller's, or once
// in all.
template <class Operation>
__device__ __forceinline__ float block_reduce(float x, float* scratch) {
    x = warp_reduce<Operation>(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
    for (int w = 1; w < blockDim.x / 32; ++w) x = Operation::of(x, scratch[w]);
    return x;
}

__device__ __forceinline__ float block_maximum(float x, float* scratch) { return block_reduce<Maximum>(x, scratch); }

__device__ __forceinline__ float block_sum(float x, float* scratch) { return block_reduce<Sum>(x, scratch); }

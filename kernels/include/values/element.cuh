// Tensor elements: pairs of 16-bit floats in a register, and eight consecutive elements of any type as float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "values/words.cuh"

template <class T>
struct Float16;  // two 16-bit floats in one register, the first in the low half

template <>
struct Float16<__half> {
    static constexpr u32 kOnes = 0x3C003C00;  // two times 1.0

    static __device__ __forceinline__ u32 pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const u32&>(pair);
    }
    static __device__ __forceinline__ float2 unpack(u32 pair) {
        return __half22float2(reinterpret_cast<const __half2&>(pair));
    }
};

template <>
struct Float16<__nv_bfloat16> {
    static constexpr u32 kOnes = 0x3F803F80;

    static __device__ __forceinline__ u32 pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const u32&>(pair);
    }
    static __device__ __forceinline__ float2 unpack(u32 pair) {
        return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
    }
};

// Eight 16-bit floats as they lie in memory.
template <class T>
__device__ __forceinline__ void unpack_8(const uint4& raw, float (&x)[8]) {
    const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = Float16<T>::unpack(words[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

// Eight consecutive elements, 16-byte aligned.
template <class T>
__device__ __forceinline__ void load_8(const T* from, float (&x)[8]) {
    unpack_8<T>(__ldg(reinterpret_cast<const uint4*>(from)), x);
}

template <>
__device__ __forceinline__ void load_8<float>(const float* from, float (&x)[8]) {
    const float4 low = __ldg(reinterpret_cast<const float4*>(from));
    const float4 high = __ldg(reinterpret_cast<const float4*>(from) + 1);
    x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
    x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
}

template <class T>
__device__ __forceinline__ void store_8(T* to, const float (&x)[8]) {
    using F = Float16<T>;
    const uint4 raw = {F::pack(x[0], x[1]), F::pack(x[2], x[3]), F::pack(x[4], x[5]), F::pack(x[6], x[7])};
    __stcs(reinterpret_cast<uint4*>(to), raw);
}

template <>
__device__ __forceinline__ void store_8<float>(float* to, const float (&x)[8]) {
    __stcs(reinterpret_cast<float4*>(to), float4{x[0], x[1], x[2], x[3]});
    __stcs(reinterpret_cast<float4*>(to) + 1, float4{x[4], x[5], x[6], x[7]});
}

// x rounded to T and back.
template <class T>
__device__ __forceinline__ float rounded(float x) {
    return static_cast<float>(static_cast<T>(x));
}

// silu(gate) * up, rounded after each operation as a model of this type computes it.
template <class T>
__device__ __forceinline__ float gated(float gate, float up) {
    return rounded<T>(rounded<T>(__fdividef(gate, 1.0f + __expf(-gate))) * up);
}

// Two pairs of a 16-bit type.
template <class T>
__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up) {
    const float2 g = Float16<T>::unpack(gate), u = Float16<T>::unpack(up);
    return Float16<T>::pack(gated<T>(g.x, u.x), gated<T>(g.y, u.y));
}

// operation(a, b) of every two words.
template <class Operation>
__device__ __forceinline__ uint4 each_word(const uint4& a, const uint4& b, Operation operation) {
    return {operation(a.x, b.x), operation(a.y, b.y), operation(a.z, b.z), operation(a.w, b.w)};
}

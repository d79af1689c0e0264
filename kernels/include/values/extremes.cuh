// Minima, maxima and what equals them, of floats and of pairs of 16-bit ones in a register. What is not a number stays
// one, as in torch and not in fminf.
#pragma once

#include "values/element.cuh"

__device__ __forceinline__ float minimum(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float maximum(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

template <class T>
__device__ __forceinline__ u32 minimum_pair(u32 a, u32 b);
template <class T>
__device__ __forceinline__ u32 maximum_pair(u32 a, u32 b);

template <>
__device__ __forceinline__ u32 minimum_pair<__half>(u32 a, u32 b) {
    u32 c;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

template <>
__device__ __forceinline__ u32 maximum_pair<__half>(u32 a, u32 b) {
    u32 c;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

template <>
__device__ __forceinline__ u32 minimum_pair<__nv_bfloat16>(u32 a, u32 b) {
    u32 c;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

template <>
__device__ __forceinline__ u32 maximum_pair<__nv_bfloat16>(u32 a, u32 b) {
    u32 c;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}

// Ones in the halves where two pairs are equal are added to `counts`, exact up to 256.
template <class T>
__device__ __forceinline__ void count_equal(u32 a, u32 b, u32& counts);

template <>
__device__ __forceinline__ void count_equal<__half>(u32 a, u32 b, u32& counts) {
    using Pair = __half2;
    Pair& sum = reinterpret_cast<Pair&>(counts);
    sum = __hadd2(sum, __heq2(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b)));
}

template <>
__device__ __forceinline__ void count_equal<__nv_bfloat16>(u32 a, u32 b, u32& counts) {
    using Pair = __nv_bfloat162;
    Pair& sum = reinterpret_cast<Pair&>(counts);
    sum = __hadd2(sum, __heq2(reinterpret_cast<Pair&>(a), reinterpret_cast<Pair&>(b)));
}

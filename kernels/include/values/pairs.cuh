// Arithmetic on pairs of 16-bit floats in a register, each result rounded once.
#pragma once

#include "values/element.cuh"

template <class T>
struct Pair;

template <>
struct Pair<__half> {
    using Type = __half2;
};

template <>
struct Pair<__nv_bfloat16> {
    using Type = __nv_bfloat162;
};

template <class T, class Operation>
__device__ __forceinline__ u32 on_pairs(u32 a, u32 b, Operation operation) {
    using P = typename Pair<T>::Type;
    const P result = operation(reinterpret_cast<const P&>(a), reinterpret_cast<const P&>(b));
    return reinterpret_cast<const u32&>(result);
}

template <class T>
__device__ __forceinline__ u32 multiplied(u32 a, u32 b) {
    return on_pairs<T>(a, b, [](auto x, auto y) { return __hmul2(x, y); });
}

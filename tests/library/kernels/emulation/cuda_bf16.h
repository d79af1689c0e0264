// CUDA's bfloat16 for a C++ compiler: rounds to the nearest, halves to even.
#pragma once

#include "cuda_fp16.h"

inline std::uint16_t bfloat16_bits(float x) {
    const unsigned bits = __float_as_uint(x);
    if (x != x) return 0x7FFF;
    return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

struct __nv_bfloat16 {
    std::uint16_t bits;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) : bits(bfloat16_bits(x)) {}
    explicit operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {__nv_bfloat16(low), __nv_bfloat16(high)};
}

// CUDA's 16-bit floats, its vectors and its intrinsics for a C++ compiler: what row kernels use of them, one thread at
// a time. Roundings are the GPU's; `warp.h` has what lanes say to each other.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

template <class To, class From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline int __float_as_int(float x) { return same_bits<int>(x); }

// The compiler is told not to contract (-ffp-contract=off): each of these rounds once.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __saturatef(float x) { return x > 0.f ? x < 1.f ? x : 1.f : 0.f; }
inline float fmaf(float a, float b, float c) { return std::fma(a, b, c); }
// Fast ones are as exact as the others here.
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __powf(float x, float exponent) { return std::pow(x, exponent); }
using std::max;
using std::min;

inline unsigned half_bits(float x) { return same_bits<std::uint16_t>(static_cast<_Float16>(x)); }
inline float half_value(unsigned bits) {
    return static_cast<float>(same_bits<_Float16>(static_cast<std::uint16_t>(bits)));
}

struct __half {
    std::uint16_t bits;
    __half() = default;
    explicit __half(float x) : bits(static_cast<std::uint16_t>(half_bits(x))) {}
    explicit operator float() const { return half_value(bits); }
};
struct __half2 {
    __half x, y;
};
inline __half2 __floats2half2_rn(float low, float high) { return {__half(low), __half(high)}; }
inline float2 __half22float2(__half2 pair) { return {static_cast<float>(pair.x), static_cast<float>(pair.y)}; }

// Sums and products of 16-bit floats are exact in float64, so that one rounding is left.
template <class Operation>
inline __half2 each_half(__half2 a, __half2 b, __half2 c, Operation operation) {
    const auto one = [&](__half x, __half y, __half z) {
        const double exact = operation(static_cast<float>(x), static_cast<float>(y), static_cast<float>(z));
        return __half{same_bits<__half>(static_cast<_Float16>(exact))};
    };
    return {one(a.x, b.x, c.x), one(a.y, b.y, c.y)};
}
inline double saturated(double x) { return x > 0. ? x < 1. ? x : 1. : 0.; }
inline __half2 __hadd2(__half2 a, __half2 b) {
    return each_half(a, b, a, [](double x, double y, double) { return x + y; });
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return each_half(a, b, a, [](double x, double y, double) { return x - y; });
}
inline __half2 __hadd2_sat(__half2 a, __half2 b) {
    return each_half(a, b, a, [](double x, double y, double) { return saturated(x + y); });
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return each_half(a, b, c, [](double x, double y, double z) { return x * y + z; });
}

// Bytes of two words, chosen by the digits of `order`.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned order) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (order >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

template <class T>
inline T __ldg(const T* from) {
    return *from;
}
template <class T>
inline T __ldcs(const T* from) {
    return *from;
}
template <class T>
inline void __stcs(T* to, const T& x) {
    *to = x;
}

// Quantization to floats of 8 and 4 bits by the rules of rotquant/tensors/fp4.py and quantization.py, of values in
// registers: FP8 (E4M3 with a scale for each row), MXFP4 (E2M1, groups of 32, scales E8M0) and NVFP4 (E2M1, groups of
// 16, scales E4M3, and a scale of the whole tensor that is given).
//
// Codes of E4M3 are bytes; those of E2M1 two to a byte, the earlier in the low half. Scales of groups are bytes
// [rows, groups]. Instructions for E2M1 exist from sm_100 on: here it is arithmetic on float16 pairs, sm_80 and newer.
#pragma once

#include "epilogue/codes.cuh"
#include "values/element.cuh"

// ---- E4M3: a sign, 4 bits of exponent, 3 of mantissa ----

constexpr float kLargestE4M3 = 448.0f;

// The nearest number of E4M3 as a byte, of two the one with an even last bit; what is larger saturates.
__device__ __forceinline__ u32 e4m3_by_integers(float x) {
    const float size = fminf(fabsf(x), kLargestE4M3);
    // Below 2^-6 steps are 2^-9, which is the last bit of a float32 of 2^14.
    const u32 small = __float_as_uint(size + 16384.0f) & 0xFF, bits = __float_as_uint(size);
    const u32 usual = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
    return (size < 0.015625f ? small : usual) | (__float_as_uint(x) >> 24 & 0x80);
}

// Of two values, the first in the low byte.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    return ptx::e4m3x2(low, high);
#else
    return e4m3_by_integers(low) | e4m3_by_integers(high) << 8;
#endif
}

// The value of a byte without a sign.
__device__ __forceinline__ float e4m3_value(u32 byte) {
    return Float16<__half>::unpack(byte << 7).x * 256.0f;  // float16 has the same fields, and a bias 8 larger
}

// Codes of a row for a scale. `slope` takes a value to steps of the scale.
struct E4m3Codes {
    float slope;

    __device__ __forceinline__ u32 pair(float low, float high) const { return e4m3_pair(low * slope, high * slope); }

    // Codes of eight consecutive values in the bytes of two words.
    __device__ __forceinline__ uint2 held(const float (&v)[8]) const {
        return {pair(v[0], v[1]) | pair(v[2], v[3]) << 16, pair(v[4], v[5]) | pair(v[6], v[7]) << 16};
    }
};

// `CodeRange` of FP8.
struct E4m3Range {
    static constexpr bool is_static = false;
    static constexpr float static_scale = 0.0f;
    float norm, to_scale;

    __device__ __forceinline__ E4m3Range(const Codes& q, float norm)
        : norm(norm), to_scale(__fdiv_rn(q.clip_ratio, kLargestE4M3) * norm) {}

    __device__ __forceinline__ float scale(float row_maximum) const {
        return fmaxf(row_maximum * to_scale, kSmallestScale);
    }

    __device__ __forceinline__ E4m3Codes codes(float scale) const { return {norm * ptx::fast_reciprocal(scale)}; }
};

// ---- E2M1: a sign, 2 bits of exponent, 1 of mantissa ----

// The nearest numbers of E2M1 as 4 bits, of two the one with an even last bit, in the low bytes of a word's halves.
// `halves`: float16 pair of the values' halves.
//
// The code of a magnitude a is 2 a rounded up to a = 2, a + 2 up to 4, a / 2 + 4 up to 6, and 7 beyond: the sum of three
// ramps that each end where the next begins. So at most one has a fraction, which the addition to 1024 rounds.
__device__ __forceinline__ u32 e2m1_pair(u32 halves) {
    const auto pair = [](u32 bits) { return reinterpret_cast<const __half2&>(bits); };
    const __half2 size = pair(ptx::abs_f16x2(halves));
    const __half2 to_2 = __hadd2_sat(size, pair(0u)), to_4 = __hadd2_sat(size, pair(0xBC00BC00u));  // 0, -1
    const __half2 to_6 = __hadd2_sat(size, pair(0xC000C000u));                                      // -2
    // 1024, and 8 more of a negative value: 1028 less 4 with its sign.
    const __half2 start = __hsub2(pair(0x64046404u), pair(ptx::masked_xor(halves, 0x80008000u, 0x44004400u)));
    const __half2 sum = __hfma2(to_4, pair(0x40004000u), __hadd2(to_6, start));  // times 2
    const __half2 codes = __hfma2(to_2, pair(0x44004400u), sum);                 // times 4
    return reinterpret_cast<const u32&>(codes);
}

// A group's scale as it is stored, and what takes its values to halves of steps of it.
struct GroupScale {
    u32 stored;
    float slope;
};

// Scales of groups, of values that are still to be multiplied by `norm`.
template <Output Out>
struct GroupRange;

template <>
struct GroupRange<kMxfp4> {
    static constexpr int kSize = 32;
    float norm, clip_ratio;

    __device__ __forceinline__ GroupRange(const Codes& q, float norm) : norm(norm), clip_ratio(q.clip_ratio) {}

    // The power of two by which the largest magnitude lies in [3.5, 7).
    __device__ __forceinline__ GroupScale scale(float largest) const {
        const u32 bits = __float_as_uint(largest * norm * clip_ratio);
        const int stored = max(static_cast<int>((bits + 0x200000u) >> 23) - 2, 0);  // 7 / 4 and more: the next one
        return {static_cast<u32>(stored), norm * __uint_as_float(max(253 - stored, 0) << 23)};
    }
};

template <>
struct GroupRange<kNvfp4> {
    static constexpr int kSize = 16;
    static constexpr u32 kNotZero = 0x20;  // 0.125, in place of a scale of zero
    float to_scale, to_slope;

    __device__ __forceinline__ GroupRange(const Codes& q, float norm) {
        to_scale = __fdiv_rn(q.clip_ratio, 6.0f) * norm * *q.static_scale;
        to_slope = 0.5f * norm * *q.static_scale;
    }

    // The number of E4M3 by which the largest magnitude is 6.
    __device__ __forceinline__ GroupScale scale(float largest) const {
        u32 stored = e4m3_pair(largest * to_scale, 0.0f);
        if (stored == 0) stored = kNotZero;
        return {stored, to_slope * ptx::fast_reciprocal(e4m3_value(stored))};
    }
};

// The scale of the group of eight values of this lane and those of its neighbours at distances First, 2 First ..
template <int First, Output Out>
__device__ __forceinline__ GroupScale scale_of_group(const GroupRange<Out>& range, const float (&v)[8]) {
    float largest = fabsf(v[0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
    for (int mask = First; mask < First * GroupRange<Out>::kSize / 8; mask *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, mask));
    return range.scale(largest);
}

// Codes of eight consecutive values of a group, two to a byte.
__device__ __forceinline__ u32 group_codes(const float (&v)[8], float slope) {
    const auto codes = [&](int i, int j) {
        return e2m1_pair(Float16<__half>::pack(v[i] * slope, v[j] * slope));
    };
    return __byte_perm(codes(0, 2), codes(4, 6), 0x6420) + 16 * __byte_perm(codes(1, 3), codes(5, 7), 0x6420);
}

// Write the codes of this lane's eight values to `codes`, and from the lane that leads a group its scale to `scales`.
template <int First, Output Out>
__device__ __forceinline__ void write_group(const GroupRange<Out>& range, const float (&v)[8], char* codes,
                                            char* scales, bool leads, bool valid) {
    const GroupScale scale = scale_of_group<First>(range, v);
    ptx::store_if(codes, group_codes(v, scale.slope), valid);
    ptx::store_byte_if(scales, scale.stored, leads && valid);
}

// ---- any output ----

template <Output Out>
struct RangeFor {
    using Type = CodeRange<Out == kInt4 ? 4 : 8>;
};
template <>
struct RangeFor<kFp8> {
    using Type = E4m3Range;
};
template <>
struct RangeFor<kMxfp4> {
    using Type = GroupRange<kMxfp4>;
};
template <>
struct RangeFor<kNvfp4> {
    using Type = GroupRange<kNvfp4>;
};

// What of a quantization does not change from row to row.
template <Output Out>
using RangeOf = typename RangeFor<Out>::Type;

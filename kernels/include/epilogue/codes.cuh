// Symmetric quantization of eight consecutive values in registers: codes in bytes, or packed as layouts.pack_rows says.
#pragma once

#include "ptx/instructions.cuh"

// What is written: the type of the input; integers in bytes, or packed; floats of 8 bits, or of 4 in groups
// (epilogue/floats.cuh).
enum Output : int { kSame, kInt8, kInt4, kFp8, kMxfp4, kNvfp4 };

// Whether groups within a row have scales of their own.
template <Output Out>
constexpr bool kInGroups = Out == kMxfp4 || Out == kNvfp4;

// Bytes of two results, of which the type of the input has 16 bits.
template <Output Out>
constexpr int kBytesOfTwo = Out == kSame ? 4 : Out == kInt8 || Out == kFp8 ? 2 : 1;

// What every kernel needs to know about the codes.
struct Codes {
    void* codes;                // bytes [rows, columns], or packed [rows, columns / 2]
    float* scale;               // [rows], or [1] if static; of groups bytes [rows, groups]
    const float* static_scale;  // null: dynamic; of NVFP4 the scale of the whole tensor
    float clip_ratio;
    int largest;  // 2^(bits - 1) - 1, or the largest float
};

constexpr float kSmallestScale = 1.17549435e-38f;  // the smallest normal float32, as in rotquant.tensors.quantization

__device__ __forceinline__ float dynamic_scale(float row_maximum, const Codes& q) {
    return fmaxf(__fdiv_rn(q.clip_ratio * row_maximum, static_cast<float>(q.largest)), kSmallestScale);
}

// Adding 1.5 * 2^23 rounds to the nearest integer, halves to even, and leaves it in the low bits of the sum.
constexpr float kRounder = 12582912.0f;

// The low byte is the code of `value`, which is in steps of the scale, clamped.
__device__ __forceinline__ u32 code_of(float value, int largest) {
    const float high = kRounder + static_cast<float>(largest), low = kRounder - static_cast<float>(largest + 1);
    return __float_as_uint(fminf(fmaxf(value + kRounder, low), high));
}

// Low bytes of four words in one.
__device__ __forceinline__ u32 gather_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// The quotient rounded as IEEE division rounds it, from the rounded reciprocal of the divisor (Markstein).
__device__ __forceinline__ float quotient(float x, float divisor, float reciprocal) {
    const float q = x * reciprocal;
    return fmaf(fmaf(-q, divisor, x), reciprocal, q);
}

// What turns values into codes by two multiply-adds: the clamp is the saturation of the first to 0..1, the range of
// codes shifted and scaled, which moves a value by 2^-25 of that range. `Bits`: of the field that a code gets, 8 or 4.
template <int Bits>
struct ScaledCodes {
    static constexpr u32 kFlip = Bits == 8 ? 0x80808080u : 0x88888888u;  // codes come out shifted by half a field
    float slope, middle, levels, rounder;

    // `slope` takes a value to a code divided by the number of steps between codes.
    __device__ __forceinline__ ScaledCodes(float slope, float levels, float middle, float rounder)
        : slope(slope), middle(middle), levels(levels), rounder(rounder) {}

    // The low `Bits` bits are the shifted code.
    __device__ __forceinline__ u32 shifted(float value) const {
        return __float_as_uint(fmaf(__saturatef(fmaf(value, slope, middle)), levels, rounder));
    }

    // Codes of eight consecutive values in the bytes of two words.
    __device__ __forceinline__ uint2 held(const float (&v)[8]) const {
        return {gather_bytes(shifted(v[0]), shifted(v[1]), shifted(v[2]), shifted(v[3])) ^ kFlip,
                gather_bytes(shifted(v[4]), shifted(v[5]), shifted(v[6]), shifted(v[7])) ^ kFlip};
    }

    // Codes of four values and of the four 16 columns on: lower and upper halves of the bytes of a word.
    __device__ __forceinline__ u32 packed(const float (&v)[8]) const {
        return gather_bytes(shifted(v[0]) + 16 * shifted(v[4]), shifted(v[1]) + 16 * shifted(v[5]),
                            shifted(v[2]) + 16 * shifted(v[6]), shifted(v[3]) + 16 * shifted(v[7])) ^ kFlip;
    }
};

// What of a quantization does not change from row to row, for values that are still to be multiplied by `norm`.
template <int Bits>
struct CodeRange {
    float levels, middle, rounder, to_scale, to_slope, static_scale;
    bool is_static;

    __device__ __forceinline__ CodeRange(const Codes& q, float norm) {
        levels = static_cast<float>(2 * q.largest + 1);
        middle = __fdiv_rn(static_cast<float>(q.largest + 1), levels);
        rounder = 8388608.0f + static_cast<float>((1 << (Bits - 1)) - 1 - q.largest);
        to_scale = __fdiv_rn(q.clip_ratio, static_cast<float>(q.largest)) * norm;
        to_slope = __fdiv_rn(norm, levels);
        is_static = q.static_scale != nullptr;
        static_scale = is_static ? *q.static_scale : 0.0f;
    }

    __device__ __forceinline__ float scale(float row_maximum) const {
        return is_static ? static_scale : fmaxf(row_maximum * to_scale, kSmallestScale);
    }

    __device__ __forceinline__ ScaledCodes<Bits> codes(float scale) const {
        return {to_slope * ptx::fast_reciprocal(scale), levels, middle, rounder};
    }
};

// Codes of eight consecutive values in the bytes of two words.
__device__ __forceinline__ uint2 codes_of(const float (&values)[8], int largest) {
    u32 c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = code_of(values[i], largest);
    return {gather_bytes(c[0], c[1], c[2], c[3]), gather_bytes(c[4], c[5], c[6], c[7])};
}

// Write the codes of the eight values at element `at` of [rows, columns]. Packed codes join with those 16 further on or
// back, which the lane at distance `partner` of the warp holds; each of the two writes half of their eight bytes.
template <Output Out>
__device__ __forceinline__ void write_codes(const Codes& q, long long at, uint2 own, int partner, bool valid) {
    char* out = static_cast<char*>(q.codes);
    if constexpr (Out == kInt8) {
        if (valid) __stcs(reinterpret_cast<uint2*>(out + at), own);
    } else {
        const bool upper = at & 16;
        const u32 theirs = __shfl_xor_sync(0xFFFFFFFFu, upper ? own.x : own.y, partner);
        const u32 low = upper ? theirs : own.x, high = upper ? own.y : theirs;
        const u32 word = (low & 0x0F0F0F0Fu) | ((high << 4) & 0xF0F0F0F0u);
        if (valid) __stcs(reinterpret_cast<u32*>(out + at / 32 * 16 + (at & 8) + (upper ? 4 : 0)), word);
    }
}

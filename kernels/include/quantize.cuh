// Symmetric quantization of eight consecutive values in registers: codes in bytes, or packed as layouts.pack_rows says.
#pragma once

enum Output : int { kSame, kInt8, kInt4 };  // the type of the input, codes in bytes, packed codes

// What every kernel needs to know about the codes.
struct Codes {
    void* codes;                // int8 [rows, columns] or packed uint8 [rows, columns / 2]
    float* scale;               // [rows], or [1] if static
    const float* static_scale;  // null: dynamic
    float clip_ratio;
    int largest;  // 2^(bits - 1) - 1
};

constexpr float kSmallestScale = 1.17549435e-38f;  // the smallest normal float32, as in rotquant.quantization

__device__ __forceinline__ float dynamic_scale(float row_maximum, const Codes& q) {
    return fmaxf(__fdiv_rn(q.clip_ratio * row_maximum, static_cast<float>(q.largest)), kSmallestScale);
}

// Adding 1.5 * 2^23 rounds to the nearest integer, halves to even, and leaves it in the low bits of the sum.
constexpr float kRounder = 12582912.0f;

// The low byte is the code of `value * factor`, clamped.
__device__ __forceinline__ unsigned code_of(float value, float factor, int largest) {
    const float rounded = fmaf(value, factor, kRounder);
    const float high = kRounder + static_cast<float>(largest), low = kRounder - static_cast<float>(largest + 1);
    return __float_as_uint(fminf(fmaxf(rounded, low), high));
}

// Low bytes of four words in one.
__device__ __forceinline__ unsigned gather_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// The quotient rounded as IEEE division rounds it, from the rounded reciprocal of the divisor (Markstein).
__device__ __forceinline__ float quotient(float x, float divisor, float reciprocal) {
    const float q = x * reciprocal;
    return fmaf(fmaf(-q, divisor, x), reciprocal, q);
}

// Codes of eight consecutive values in the bytes of two words.
__device__ __forceinline__ uint2 codes_of(const float (&values)[8], float factor, int largest) {
    unsigned c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = code_of(values[i], factor, largest);
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
        const unsigned theirs = __shfl_xor_sync(0xFFFFFFFFu, upper ? own.x : own.y, partner);
        const unsigned low = upper ? theirs : own.x, high = upper ? own.y : theirs;
        const unsigned word = (low & 0x0F0F0F0Fu) | ((high << 4) & 0xF0F0F0F0u);
        if (valid) __stcs(reinterpret_cast<unsigned*>(out + at / 32 * 16 + (at & 8) + (upper ? 4 : 0)), word);
    }
}

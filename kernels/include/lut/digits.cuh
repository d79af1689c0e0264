// Activations as binary digits for the look-up-table products (lut_gemv.cu): words of 32 inputs, one per digit.
// Architectures: sm_80 and newer.
//
// A tile is the second operand of a binary tensor-core product, 32 words: word 4 c + t is digit (column) c of inputs
// 32 t to 32 t + 31 of a group of 128; bit 8 b + r of a word belongs to input 4 r + b of these, for weights alike.
#pragma once

#include "values/element.cuh"
#include "ptx/instructions.cuh"

namespace lut {

constexpr int kGroup = 128;
constexpr int kLanesOfGroup = 4;  // threads that prepare a group, 32 inputs each
constexpr int kTile = 32;         // words

// Bits of 1.5 * 2^23: added to an integer below 2^22 in magnitude they are the float 1.5 * 2^23 + integer.
constexpr u32 kFloatOffset = 0x4B400000u;

// What activations are when they come in, and as what they are multiplied.
template <class T>
struct Codes4 {};  // int8 holding 4-bit codes; T is signed char
template <class T>
struct Digits24 {};  // 16-bit floats, as 24-digit integers under a power of two for each row and group

template <class Kind>
constexpr bool kIsCodes = false;  // three tiles of eight digits for each group
template <class T>
constexpr bool kIsCodes<Codes4<T>> = true;  // four digits: a tile serves two groups, columns 0 to 3 and 4 to 7

template <int Distance, u32 Mask>
__device__ __forceinline__ void exchange(u32& a, u32& b) {
    const u32 low = (a & Mask) | ((b << Distance) & ~Mask);
    b = ((a >> Distance) & Mask) | (b & ~Mask);
    a = low;
}

// Word r, byte b holds value 4 r + b; afterwards bit r of byte b of word j is digit j of value 4 r + b.
__device__ __forceinline__ void transpose_digits(u32 (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exchange<4, 0x0F0F0F0Fu>(w[i], w[i + 4]);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        exchange<2, 0x33333333u>(w[i], w[i + 2]);
        exchange<2, 0x33333333u>(w[i + 1], w[i + 3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) exchange<1, 0x55555555u>(w[i], w[i + 1]);
}

// Four digits of 32 codes into their half of a tile; true if a code needs more than four.
__device__ __forceinline__ bool store_codes(u32 (&w)[8], u32* half_tile, int t) {
    transpose_digits(w);
#pragma unroll
    for (int j = 0; j < 4; ++j) half_tile[4 * j + t] = w[j];
    return ((w[3] ^ w[4]) | (w[3] ^ w[5]) | (w[3] ^ w[6]) | (w[3] ^ w[7])) != 0;
}

// Eight digits of 32 values into a tile.
__device__ __forceinline__ void store_bytes(u32 (&w)[8], u32* tile, int t) {
    transpose_digits(w);
#pragma unroll
    for (int j = 0; j < 8; ++j) tile[4 * j + t] = w[j];
}

template <class T>
__device__ __forceinline__ void load_32(const T* from, float (&x)[4][8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_8(from + 8 * i, x[i]);
}

__device__ __forceinline__ u32 largest_magnitude(const float (&x)[4][8]) {
    u32 largest = 0;  // as bits, so that a NaN is larger than everything
#pragma unroll
    for (int i = 0; i < 32; ++i) largest = max(largest, __float_as_uint(x[i / 8][i % 8]) & 0x7FFFFFFFu);
    return largest;
}

// 32 values as three tiles' words; the four threads of a group call together. Returns the value of the last digit, a
// power of two, or NaN where a value of the group is not finite.
__device__ __forceinline__ float store_digits(const float (&x)[4][8], u32* tiles, int t) {
    const u32 four_lanes = 0xFu << (threadIdx.x % 32 / 4 * 4);
    u32 largest = largest_magnitude(x);
    largest = max(largest, __shfl_xor_sync(four_lanes, largest, 1));
    largest = max(largest, __shfl_xor_sync(four_lanes, largest, 2));
    // |x| < 2^(exponent - 126), so |x| / 2^(exponent - 148) < 2^22.
    const u32 exponent = max(largest >> 23, 22u);
    const float to_integer = __uint_as_float((275u - exponent) << 23);
    u32 low[8], middle[8], high[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = x[r / 2][r % 2 * 4 + i];
            v[i] = __float_as_uint(fmaf(value, to_integer, __uint_as_float(kFloatOffset))) - kFloatOffset;
        }
        const u32 a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
        low[r] = __byte_perm(a, b, 0x5410);
        middle[r] = __byte_perm(a, b, 0x7632);
        high[r] = __byte_perm(__byte_perm(v[0], v[1], 0x62), __byte_perm(v[2], v[3], 0x62), 0x5410);
    }
    store_bytes(low, tiles, t);
    store_bytes(middle, tiles + kTile, t);
    store_bytes(high, tiles + 2 * kTile, t);
    return __uint_as_float(exponent == 255u ? 0x7FC00000u : (exponent - 21u) << 23);
}

}  // namespace lut

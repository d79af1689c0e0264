// What conversions of epilogue/ use of kernels/include/ptx/instructions.cuh, without its instructions.
#pragma once

#include "cuda_bf16.h"
#include "values/words.cuh"

namespace ptx {

inline float fast_reciprocal(float x) { return 1.f / x; }
inline u32 abs_f16x2(u32 a) { return a & 0x7FFF7FFFu; }
inline u32 masked_xor(u32 word, u32 mask, u32 bits) { return (word & mask) ^ bits; }

template <class T>
inline void store_if(void* to, T x, bool valid) {
    if (valid) *static_cast<T*>(to) = x;
}
inline void store_byte_if(void* to, u32 x, bool valid) {
    if (valid) *static_cast<unsigned char*>(to) = static_cast<unsigned char>(x);
}

}  // namespace ptx

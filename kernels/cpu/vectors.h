// Sixteen floats at a time, whatever vectors the processor has, and numbers in 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace rotquant {

// Bytes ahead of their use at which memory is asked for: two cores of a Zen 5 read 5 to 10 % faster so.
constexpr int64_t kAhead = 2048;
// Strips times blocks up to which one thread is done before a second has begun.
constexpr int64_t kAlone = 256;

// Sixteen floats, which the compiler spreads over the registers that the processor has.
constexpr int64_t kLanes = 16;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));

// One row's values come as float, or as the upper halves of floats (bfloat16).
inline float widen(float x) { return x; }
inline float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, uint16_t& y) {  // halves to even; what is not a number stays none
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y = static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Floats load(const float* x) {
  Floats values;
  std::memcpy(&values, x, sizeof values);
  return values;
}

using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline Floats load(const uint16_t* x) {
  using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  Halves halves;
  std::memcpy(&halves, x, sizeof halves);
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

inline void store(Floats values, float* y) { std::memcpy(y, &values, sizeof values); }

inline float total(Floats values) {  // in pairs, which is faster than one after another, and more exact
  using Eight = float __attribute__((vector_size(8 * sizeof(float))));
  using Four = float __attribute__((vector_size(4 * sizeof(float))));
  Eight halves[2];
  std::memcpy(halves, &values, sizeof values);
  halves[0] += halves[1];
  Four quarters[2];
  std::memcpy(quarters, halves, sizeof quarters);
  const Four sums = quarters[0] + quarters[1];
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

}  // namespace rotquant

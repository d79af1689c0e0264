// Sums of integer products of 4-bit codes with 8-bit activations, in the instructions that the processor has; all of them
// give the same integers.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__AVX512BW__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace rotquant {

// A strip is so many rows of a weight, block by block; a block is 128 codes of a row in 64 bytes. Byte j holds code j in
// its low half and code j + 64 in its high half, so that a mask and a shift give vectors in the order of the activations.
constexpr int64_t kStrip = 4, kBlock = 128, kBlockBytes = 64;

// Sums of products of one row's codes, 0 to 15, with activations, -128 to 127, a block at a time.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr const char* kInstructions = "AVX-512 VNNI";

struct Sums {
  __m512i lanes = _mm512_setzero_si512();

  void add(const uint8_t* codes, const int8_t* x) {
    const __m512i mask = _mm512_set1_epi8(15), w = _mm512_loadu_si512(codes);
    lanes = _mm512_dpbusd_epi32(lanes, _mm512_and_si512(w, mask), _mm512_loadu_si512(x));
    lanes = _mm512_dpbusd_epi32(lanes, _mm512_and_si512(_mm512_srli_epi16(w, 4), mask), _mm512_loadu_si512(x + 64));
  }

  int32_t total() const { return _mm512_reduce_add_epi32(lanes); }
};

#elif defined(__AVX2__)

#if defined(__AVXVNNI__)
constexpr const char* kInstructions = "AVX-VNNI";
#else
constexpr const char* kInstructions = "AVX2";
#endif

struct Sums {
  __m256i lanes = _mm256_setzero_si256();

  void add(const uint8_t* codes, const int8_t* x) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int half = 0; half < 2; ++half) {
      const __m256i w = load(codes + 32 * half);
      const __m256i low = _mm256_and_si256(w, mask), high = _mm256_and_si256(_mm256_srli_epi16(w, 4), mask);
      const __m256i x_low = load(x + 32 * half), x_high = load(x + 32 * half + 64);
#if defined(__AVXVNNI__)
      lanes = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(lanes, low, x_low), high, x_high);
#else
      // Four products of at most 15 * 128 fit in the 16 bits of maddubs and of the sum.
      const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(low, x_low), _mm256_maddubs_epi16(high, x_high));
      lanes = _mm256_add_epi32(lanes, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
  }

  int32_t total() const {
    alignas(32) int32_t parts[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), lanes);
    int32_t sum = 0;
    for (int32_t part : parts) sum += part;
    return sum;
  }

 private:
  static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
};

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr const char* kInstructions = "NEON dot product";

struct Sums {
  int32x4_t lanes = vdupq_n_s32(0);

  void add(const uint8_t* codes, const int8_t* x) {
    for (int part = 0; part < 64; part += 16) {
      const uint8x16_t w = vld1q_u8(codes + part);
      lanes = vdotq_s32(lanes, vreinterpretq_s8_u8(vandq_u8(w, vdupq_n_u8(15))), vld1q_s8(x + part));
      lanes = vdotq_s32(lanes, vreinterpretq_s8_u8(vshrq_n_u8(w, 4)), vld1q_s8(x + part + 64));
    }
  }

  int32_t total() const { return vaddvq_s32(lanes); }
};

#else

constexpr const char* kInstructions = "portable C++";

struct Sums {
  int32_t sum = 0;

  void add(const uint8_t* codes, const int8_t* x) {
    for (int64_t j = 0; j < kBlockBytes; ++j) sum += (codes[j] & 15) * x[j] + (codes[j] >> 4) * x[j + 64];
  }

  int32_t total() const { return sum; }
};

#endif

}  // namespace rotquant

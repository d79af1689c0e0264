// Products of one token with a weight: 4-bit integers with 8-bit activations (SpinQuant Table 6, W4A8), and bfloat16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "dot.h"
#include "vectors.h"

namespace rotquant {

// A row as 8-bit codes q with x = scale * (q - zero_point): asymmetric, from the least value to the greatest, which
// zero lies between; the arithmetic of rotquant.tensors.quantization.
template <typename T>
void quantize_row(const T* x, int64_t features, uint8_t* codes, float* scale, int32_t* zero_point) {
  float low = 0.0f, high = 0.0f;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < features; ++i) {
    low = std::min(low, widen(x[i]));
    high = std::max(high, widen(x[i]));
  }
  const float step = std::max((high - low) / 255.0f, 1.17549435e-38f), zero = std::rint(-low / step);
#pragma omp simd
  for (int64_t i = 0; i < features; ++i) {
    codes[i] = static_cast<uint8_t>(std::min(std::max(std::rint(widen(x[i]) / step) + zero, 0.0f), 255.0f));
  }
  *scale = step;
  *zero_point = static_cast<int32_t>(zero);
}

// store(row, sum) for every row of a weight, sum being that of (code - 8) * (q - zero_point), exactly.
template <typename Store>
void product(const uint8_t* codes, int64_t features, int32_t zero_point, const uint8_t* weight, const int32_t* sums,
             int64_t rows, Store store) {
  const int64_t blocks = (features + kBlock - 1) / kBlock, strips = (rows + kStrip - 1) / kStrip;
  // Instructions multiply unsigned by signed: activations are moved by 128, and the sums of weights take it back.
  std::vector<int8_t> signed_codes(blocks * kBlock, 0);
  int32_t total = 0;
  for (int64_t i = 0; i < features; ++i) {
    signed_codes[i] = static_cast<int8_t>(codes[i] ^ 0x80);
    total += signed_codes[i];
  }
  const int8_t* x = signed_codes.data();
#pragma omp parallel for schedule(static) if (strips * blocks > kAlone)
  for (int64_t strip = 0; strip < strips; ++strip) {
    Sums row[kStrip];
    const uint8_t* w = weight + strip * blocks * kStrip * kBlockBytes;
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t i = 0; i < kStrip; ++i, w += kBlockBytes) {
        __builtin_prefetch(w + kAhead);
        row[i].add(w, x + block * kBlock);
      }
    }
    for (int64_t i = 0; i < std::min(kStrip, rows - strip * kStrip); ++i) {
      const int64_t at = strip * kStrip + i;
      store(at, row[i].total() - 8 * total - (zero_point - 128) * sums[at]);
    }
  }
}

template <typename T>
void linear(const T* x, int64_t features, const uint8_t* weight, const float* scales, const int32_t* sums, int64_t rows,
            T* y) {
  std::vector<uint8_t> codes(features);
  float scale;
  int32_t zero_point;
  quantize_row(x, features, codes.data(), &scale, &zero_point);
  product(codes.data(), features, zero_point, weight, sums, rows, [=](int64_t row, int32_t sum) {
    narrow(static_cast<float>(sum) * scale * scales[row], y[row]);
  });
}

// sum + the products of 32 bfloat16 pairs. Read as 32-bit words, the even ones are a shift away, and the odd ones a mask.
inline Floats add_products(Floats sum, const uint16_t* w, const uint16_t* x) {
#if defined(__AVX512BF16__)
  const __m512i pairs = _mm512_loadu_si512(w), others = _mm512_loadu_si512(x);
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(pairs),
                                                   reinterpret_cast<__m512bh>(others)));
#else
  Words pairs, others;
  std::memcpy(&pairs, w, sizeof pairs);
  std::memcpy(&others, x, sizeof others);
  sum += reinterpret_cast<Floats>(pairs << 16) * reinterpret_cast<Floats>(others << 16);
  return sum + reinterpret_cast<Floats>(pairs & 0xffff0000u) * reinterpret_cast<Floats>(others & 0xffff0000u);
#endif
}

// y = x times a bfloat16 weight [rows, features], summed in float32. Row by row, so that a core reads one stream.
inline void product16(const uint16_t* x, int64_t features, const uint16_t* weight, int64_t rows, uint16_t* y) {
  constexpr int64_t kPairs = 2 * kLanes, kChains = 4;
  const int64_t whole = features - features % (kChains * kPairs);
#pragma omp parallel for schedule(static) if (rows * features > kAlone * kBlockBytes)
  for (int64_t row = 0; row < rows; ++row) {
    const uint16_t* w = weight + row * features;
    Floats sums[kChains] = {};
    for (int64_t start = 0; start < whole; start += kChains * kPairs) {
      for (int64_t i = 0; i < kChains; ++i) {
        const int64_t at = start + i * kPairs;
        __builtin_prefetch(w + at + kAhead / 2);
        sums[i] = add_products(sums[i], w + at, x + at);
      }
    }
    float sum = total(sums[0] + sums[1] + (sums[2] + sums[3]));
    for (int64_t k = whole; k < features; ++k) sum += widen(w[k]) * widen(x[k]);
    narrow(sum, y[row]);
  }
}

}  // namespace rotquant

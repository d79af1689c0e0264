// Attention of one token to a cache of keys and values, in float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace rotquant {

// e^x of numbers that are not positive, to a few units in the last place: 2^n times a polynomial of what is left, after
// Cody and Waite. Below -87 it is that of -87, nothing beside a sum that has a 1 in it.
inline Floats exponential(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: added and taken away, it leaves the nearest integer
  const Floats bounded = x > -87.0f ? x : Floats{} - 87.0f;
  const Floats shifted = bounded * 1.44269504f + kRound, n = shifted - kRound;
  const Floats r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  for (float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + coefficient;
  return p * reinterpret_cast<Floats>((reinterpret_cast<Words>(shifted) + 127) << 23);
}

// Attention of kQueries queries [.., dim], as floats, to the keys and values [length, dim] that they share.
template <int kQueries, typename T>
void attend(const float* queries, int64_t dim, const T* keys, const T* values, int64_t length, T* y) {
  // So many tokens stay in the first cache while all their features are summed, and the next are on their way.
  constexpr int64_t kTokens = 64, kLine = 64 / sizeof(T);
  static_assert(kLanes % kQueries == 0, "a vector holds the same queries at the same places");
  const int64_t padded = (length * kQueries + kLanes - 1) / kLanes * kLanes;
  std::vector<float> weights(padded, -INFINITY);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  float highest[kQueries], norms[kQueries] = {};
  std::fill(highest, highest + kQueries, -INFINITY);
  for (int64_t token = 0; token < length; ++token) {
    Floats products[kQueries] = {};
    for (int64_t i = 0; i < dim; i += kLanes) {
      __builtin_prefetch(keys + token * dim + i + kAhead / 2);
      const Floats key = load(keys + token * dim + i);
      for (int q = 0; q < kQueries; ++q) products[q] += load(queries + q * dim + i) * key;
    }
    for (int q = 0; q < kQueries; ++q) {
      const float score = weights[token * kQueries + q] = total(products[q]) * scale;
      highest[q] = std::max(highest[q], score);
    }
  }
  Floats peaks, totals = {};
  for (int64_t i = 0; i < kLanes; ++i) peaks[i] = highest[i % kQueries];
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats values = exponential(load(weights.data() + i) - peaks);
    store(values, weights.data() + i);
    totals += values;
  }
  for (int64_t i = 0; i < kLanes; ++i) norms[i % kQueries] += totals[i];
  std::vector<float> sums(kQueries * dim, 0.0f);
  for (int64_t start = 0; start < length; start += kTokens) {
    for (int64_t i = 0; i < dim; i += kLanes) {
      Floats parts[kQueries];
      for (int q = 0; q < kQueries; ++q) parts[q] = load(sums.data() + q * dim + i);
      for (int64_t token = start; token < std::min(start + kTokens, length); ++token) {
        if (i == 0) {
          for (int64_t line = 0; line < dim; line += kLine) __builtin_prefetch(values + (token + kTokens) * dim + line);
        }
        const Floats value = load(values + token * dim + i);
        for (int q = 0; q < kQueries; ++q) parts[q] += value * weights[token * kQueries + q];
      }
      for (int q = 0; q < kQueries; ++q) store(parts[q], sums.data() + q * dim + i);
    }
  }
  for (int q = 0; q < kQueries; ++q) {
    for (int64_t i = 0; i < dim; ++i) narrow(sums[q * dim + i] / norms[q], y[q * dim + i]);
  }
}

// One token of every head; the heads of a cache lie `capacity` tokens apart.
template <typename T>
void attention(const T* queries, int64_t heads, int64_t kv_heads, int64_t dim, const T* keys, const T* values,
               int64_t length, int64_t capacity, T* y) {
  const int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(static) if (heads * length > kAlone)
  for (int64_t head = 0; head < kv_heads; ++head) {
    const T *key = keys + head * capacity * dim, *value = values + head * capacity * dim;
    std::vector<float> wide(group * dim);
    for (int64_t i = 0; i < group * dim; ++i) wide[i] = widen(queries[head * group * dim + i]);
    T* result = y + head * group * dim;
    for (int64_t q = 0; q < group;) {  // as many at a time as fit in registers
      const float* query = wide.data() + q * dim;
      if (group - q >= 4) {
        attend<4>(query, dim, key, value, length, result + q * dim);
        q += 4;
      } else {
        attend<1>(query, dim, key, value, length, result + q * dim);
        q += 1;
      }
    }
  }
}

}  // namespace rotquant

// Hadamard transforms of rows, SpinQuant's online rotations R3 and R4: H_core (x) H_width as the library has it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace rotquant {

// x[n] = x times I (x) H_width, width a power of two, in place: a dense factor of at most kLanes neighbours, which is
// one vector, then the butterflies of Sylvester's construction. `table` is the dense factor, [low, low].
inline void butterflies(float* x, int64_t n, int64_t width, int64_t low, const float* table) {
  for (int64_t start = 0; start < n; start += low) {
    float values[kLanes], sums[kLanes] = {};
    std::copy(x + start, x + start + low, values);
    if (low == kLanes) {
      Floats lanes = {};
      for (int64_t i = 0; i < kLanes; ++i) lanes += load(table + i * kLanes) * values[i];
      store(lanes, x + start);
      continue;
    }
    for (int64_t i = 0; i < low; ++i) {
      for (int64_t j = 0; j < low; ++j) sums[j] += values[i] * table[i * low + j];
    }
    std::copy(sums, sums + low, x + start);
  }
  for (int64_t step = low; step < width; step *= 2) {  // low is kLanes here, or no step is left
    for (int64_t start = 0; start < n; start += 2 * step) {
      for (int64_t i = start; i < start + step; i += kLanes) {
        const Floats first = load(x + i), second = load(x + i + step);
        store(first + second, x + i);
        store(first - second, x + i + step);
      }
    }
  }
}

// y[core, width] = H_core^T times x[core, width]: what H_core (x) I does to a row. `table` is H_core.
inline void mix(const float* x, int64_t core, int64_t width, const float* table, float* y) {
  for (int64_t column = 0; column < width; column += kLanes) {
    const int64_t lanes = std::min(kLanes, width - column);
    for (int64_t j = 0; j < core; ++j) {
      if (lanes == kLanes) {
        Floats sums[4] = {};  // orders of Hadamard matrices beyond 2 are multiples of 4
        for (int64_t i = 0; i < core; i += 4) {
          for (int64_t k = 0; k < 4; ++k) {
            sums[k] += load(x + (i + k) * width + column) * table[(i + k) * core + j];
          }
        }
        store(sums[0] + sums[1] + sums[2] + sums[3], y + j * width + column);
        continue;
      }
      for (int64_t k = column; k < width; ++k) {
        float sum = 0.0f;
        for (int64_t i = 0; i < core; ++i) sum += x[i * width + k] * table[i * core + j];
        y[j * width + k] = sum;
      }
    }
  }
}

// Rows times H_core (x) H_width / sqrt(core * width).
template <typename T>
void hadamard(const T* x, int64_t rows, int64_t core, int64_t width, const float* core_table, int64_t low,
              const float* low_table, T* y) {
  const int64_t n = core * width;
  const float norm = 1.0f / std::sqrt(static_cast<float>(n));
  std::vector<float> values(n), mixed(core > 1 ? n : 0);
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
    for (int64_t i = 0; i < n; ++i) values[i] = widen(x[i]) * norm;
    butterflies(values.data(), n, width, low, low_table);
    if (core > 1) mix(values.data(), core, width, core_table, mixed.data());
    const float* result = core > 1 ? mixed.data() : values.data();
    for (int64_t i = 0; i < n; ++i) narrow(result[i], y[i]);
  }
}

}  // namespace rotquant

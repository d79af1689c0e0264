// What decoding one token on a CPU needs and torch does not have, or not fast: products of 4-bit weights with 8-bit
// activations in integer instructions (SpinQuant Table 6, W4A8), the online Hadamard transforms before them, products of
// 16-bit weights, attention of one token, and reading alone. Instructions are chosen by what the compiler is told of the
// processor; the integers are the same with all of them. Threads are those of torch's OpenMP.

#include <cstdint>

#include "attention.h"
#include "dot.h"
#include "hadamard.h"
#include "products.h"
#include "vectors.h"

using namespace rotquant;

extern "C" {

const char* rotquant_instructions() { return kInstructions; }

void rotquant_quantize(const void* x, int bfloat16, int64_t rows, int64_t features, uint8_t* codes, float* scale,
                       int32_t* zero_point) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * features;
    if (bfloat16) {
      quantize_row(static_cast<const uint16_t*>(x) + at, features, codes + at, scale + row, zero_point + row);
    } else {
      quantize_row(static_cast<const float*>(x) + at, features, codes + at, scale + row, zero_point + row);
    }
  }
}

void rotquant_product(const uint8_t* codes, const int32_t* zero_point, int64_t tokens, int64_t features,
                      const uint8_t* weight, const int32_t* sums, int64_t rows, int32_t* y) {
  for (int64_t token = 0; token < tokens; ++token) {
    product(codes + token * features, features, zero_point[token], weight, sums, rows,
            [=](int64_t row, int32_t sum) { y[token * rows + row] = sum; });
  }
}

void rotquant_linear(const void* x, int bfloat16, int64_t tokens, int64_t features, const uint8_t* weight,
                     const float* scales, const int32_t* sums, int64_t rows, void* y) {
  for (int64_t token = 0; token < tokens; ++token) {
    if (bfloat16) {
      linear(static_cast<const uint16_t*>(x) + token * features, features, weight, scales, sums, rows,
             static_cast<uint16_t*>(y) + token * rows);
    } else {
      linear(static_cast<const float*>(x) + token * features, features, weight, scales, sums, rows,
             static_cast<float*>(y) + token * rows);
    }
  }
}

void rotquant_hadamard(const void* x, int bfloat16, int64_t rows, int64_t core, int64_t width, const float* core_table,
                       int64_t low, const float* low_table, void* y) {
  if (bfloat16) {
    hadamard(static_cast<const uint16_t*>(x), rows, core, width, core_table, low, low_table, static_cast<uint16_t*>(y));
  } else {
    hadamard(static_cast<const float*>(x), rows, core, width, core_table, low, low_table, static_cast<float*>(y));
  }
}

void rotquant_attention(const void* queries, int bfloat16, int64_t heads, int64_t kv_heads, int64_t dim,
                        const void* keys, const void* values, int64_t length, int64_t capacity, void* y) {
  if (bfloat16) {
    using T = uint16_t;
    attention(static_cast<const T*>(queries), heads, kv_heads, dim, static_cast<const T*>(keys),
              static_cast<const T*>(values), length, capacity, static_cast<T*>(y));
  } else {
    using T = float;
    attention(static_cast<const T*>(queries), heads, kv_heads, dim, static_cast<const T*>(keys),
              static_cast<const T*>(values), length, capacity, static_cast<T*>(y));
  }
}

// y = x times a bfloat16 weight [rows, features], token by token.
void rotquant_linear16(const uint16_t* x, int64_t tokens, int64_t features, const uint16_t* weight, int64_t rows,
                       uint16_t* y) {
  for (int64_t token = 0; token < tokens; ++token) {
    product16(x + token * features, features, weight, rows, y + token * rows);
  }
}

// Read bytes, a multiple of 1024, and return their exclusive or: what memory gives when nothing else is done with it.
uint64_t rotquant_read(const uint64_t* x, int64_t bytes) {
  constexpr int64_t kWords = 128;
  uint64_t result = 0;
#pragma omp parallel for schedule(static) reduction(^ : result)
  for (int64_t start = 0; start < bytes / 8; start += kWords) {
    for (int64_t i = 0; i < kWords; i += 8) __builtin_prefetch(x + start + i + kAhead / 8);
    for (int64_t i = 0; i < kWords; ++i) result ^= x[start + i];
  }
  return result;
}

}

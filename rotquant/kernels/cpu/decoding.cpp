// What decoding one token on a CPU needs and torch does not have, or not fast: products of 4-bit weights with 8-bit
// activations in integer instructions (SpinQuant Table 6, W4A8), the online Hadamard transforms before them, products of
// 16-bit weights, attention of one token, and reading alone. Instructions are chosen by what the compiler is told of the
// processor; the integers are the same with all of them. Threads are those of torch's OpenMP.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__) || defined(__AVX512BW__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

// A strip is so many rows of a weight, block by block; a block is 128 codes of a row in 64 bytes. Byte j holds code j in
// its low half and code j + 64 in its high half, so that a mask and a shift give vectors in the order of the activations.
constexpr int64_t kStrip = 4, kBlock = 128, kBlockBytes = 64;
// Bytes ahead of their use at which memory is asked for: two cores of a Zen 5 read 5 to 10 % faster so.
constexpr int64_t kAhead = 2048;
// Strips times blocks up to which one thread is done before a second has begun.
constexpr int64_t kAlone = 256;

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

// Sixteen floats, which the compiler spreads over the registers that the processor has.
constexpr int64_t kLanes = 16;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));

// One row's values come as float, or as the upper halves of floats (bfloat16).
float widen(float x) { return x; }
float widen(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void narrow(float x, float& y) { y = x; }
void narrow(float x, uint16_t& y) {  // halves to even; what is not a number stays none
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y = static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

Floats load(const float* x) {
  Floats values;
  std::memcpy(&values, x, sizeof values);
  return values;
}

using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));

Floats load(const uint16_t* x) {
  using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));
  Halves halves;
  std::memcpy(&halves, x, sizeof halves);
  return reinterpret_cast<Floats>(__builtin_convertvector(halves, Words) << 16);
}

void store(Floats values, float* y) { std::memcpy(y, &values, sizeof values); }

float total(Floats values) {  // in pairs, which is faster than one after another, and more exact
  float parts[kLanes];
  store(values, parts);
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

// A row as 8-bit codes q with x = scale * (q - zero_point): asymmetric, from the least value to the greatest, which
// zero lies between; the arithmetic of rotquant.quantization.
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

// x[n] = x times I (x) H_width, width a power of two, in place: a dense factor of at most kLanes neighbours, which is
// one vector, then the butterflies of Sylvester's construction. `table` is the dense factor, [low, low].
void butterflies(float* x, int64_t n, int64_t width, int64_t low, const float* table) {
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
void mix(const float* x, int64_t core, int64_t width, const float* table, float* y) {
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

// store(row, sum) for every row of a bfloat16 weight, summed in float32. Of each 32 features that x has whole, it holds
// the even ones before the odd ones: read as 32-bit words, a weight's even ones are a shift away, and its odd ones a mask.
template <typename Store>
void product16(const float* x, int64_t features, const uint16_t* weight, int64_t rows, Store store) {
  const int64_t strips = (rows + kStrip - 1) / kStrip, whole = features - features % (2 * kLanes);
#pragma omp parallel for schedule(static) if (rows * features > kAlone * kBlockBytes)
  for (int64_t strip = 0; strip < strips; ++strip) {
    const int64_t first = strip * kStrip, several = std::min(kStrip, rows - first);
    const uint16_t* w[kStrip];
    for (int64_t i = 0; i < kStrip; ++i) w[i] = weight + (first + std::min(i, several - 1)) * features;
    Floats sums[kStrip] = {};
    for (int64_t start = 0; start < whole; start += 2 * kLanes) {
      const Floats even = load(x + start), odd = load(x + start + kLanes);
      for (int64_t i = 0; i < kStrip; ++i) {
        __builtin_prefetch(w[i] + start + kAhead / 4);
        Words pairs;
        std::memcpy(&pairs, w[i] + start, sizeof pairs);
        sums[i] += reinterpret_cast<Floats>(pairs << 16) * even;
        sums[i] += reinterpret_cast<Floats>(pairs & 0xffff0000u) * odd;
      }
    }
    for (int64_t i = 0; i < several; ++i) {
      float sum = total(sums[i]);
      for (int64_t k = whole; k < features; ++k) sum += widen(w[i][k]) * x[k];
      store(first + i, sum);
    }
  }
}

// Attention of kQueries queries [.., dim], as floats, to the keys and values [length, dim] that they share.
template <int kQueries, typename T>
void attend(const float* queries, int64_t dim, const T* keys, const T* values, int64_t length, T* y) {
  std::vector<float> weights(length * kQueries);
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
  for (int64_t token = 0; token < length; ++token) {
    for (int q = 0; q < kQueries; ++q) {
      float& weight = weights[token * kQueries + q];
      norms[q] += weight = std::exp(weight - highest[q]);
    }
  }
  std::vector<float> sums(kQueries * dim, 0.0f);
  for (int64_t start = 0; start < length; start += kAlone) {  // so many tokens stay in the cache from chunk to chunk
    for (int64_t i = 0; i < dim; i += kLanes) {
      Floats parts[kQueries];
      for (int q = 0; q < kQueries; ++q) parts[q] = load(sums.data() + q * dim + i);
      for (int64_t token = start; token < std::min(start + kAlone, length); ++token) {
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

}  // namespace

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
  std::vector<float> values(features);
  for (int64_t token = 0; token < tokens; ++token) {
    const int64_t whole = features - features % (2 * kLanes);
    for (int64_t i = 0; i < features; ++i) {
      const int64_t within = i % (2 * kLanes), at = i < whole ? i - within + within / 2 + within % 2 * kLanes : i;
      values[at] = widen(x[token * features + i]);
    }
    product16(values.data(), features, weight, rows,
              [=](int64_t row, float sum) { narrow(sum, y[token * rows + row]); });
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

// 16-bit rows to integers without a transform: plain, after SwiGLU, or after RMSNorm with a residual added (QuaRot Sec. 4).
//
// One block holds one row in registers, two values to a word as they came, and the row that it takes next is on its way.
// Squares are summed on tensor cores, where products of 16-bit values are exact. Codes are those of an IEEE division by the
// scale. float32 rows go to activations.cu. Architectures: sm_80 and newer.
#include "hadamard_mma.cuh"
#include "quantize.cuh"
#include "reduce.cuh"

#include <cuda/std/type_traits>

namespace std {
using cuda::std::is_same_v;
}  // namespace std

enum Kind : int { kPlain, kGated, kNorm };

// What one launch computes.
struct Problem {
    const void* x;         // [rows, n], or [rows, 2n] = (gate | up) with kGated
    const void* residual;  // [rows, n] or null; with kNorm
    const void* weight;    // [n] or null; with kNorm
    void* hidden;          // [rows, n] = x + residual, where there is a residual
    Codes codes;
    int n, columns;        // n a multiple of 8; columns: n padded to a multiple of 64 with zero codes
    float eps;
    int rows;
};

template <class T>
struct Pair;  // arithmetic on two 16-bit values, each result rounded once

template <>
struct Pair<__half> {
    using Type = __half2;
};

template <>
struct Pair<__nv_bfloat16> {
    using Type = __nv_bfloat162;
};

template <class T, class Operation>
__device__ __forceinline__ unsigned on_pairs(unsigned a, unsigned b, Operation operation) {
    using P = typename Pair<T>::Type;
    const P result = operation(reinterpret_cast<const P&>(a), reinterpret_cast<const P&>(b));
    return reinterpret_cast<const unsigned&>(result);
}

template <class T>
__device__ __forceinline__ unsigned added(unsigned a, unsigned b) {
    return on_pairs<T>(a, b, [](auto x, auto y) { return __hadd2(x, y); });
}

template <class T>
__device__ __forceinline__ unsigned multiplied(unsigned a, unsigned b) {
    return on_pairs<T>(a, b, [](auto x, auto y) { return __hmul2(x, y); });
}

template <class T>
__device__ __forceinline__ unsigned larger_magnitudes(unsigned a, unsigned b) {
    return on_pairs<T>(a, b, [](auto x, auto y) { return __hmax2(x, __habs2(y)); });
}

template <class T>
__device__ __forceinline__ unsigned clamped(unsigned x, unsigned low, unsigned high) {
    const unsigned y = on_pairs<T>(x, low, [](auto a, auto b) { return __hmax2(a, b); });
    return on_pairs<T>(y, high, [](auto a, auto b) { return __hmin2(a, b); });
}

// Where a thread's 16-byte pieces lie in a row: neighbours side by side, and for packed codes every second one 16 values
// after the one before, so that one thread holds both halves of each byte.
template <Output Out, int Threads>
__device__ __forceinline__ int piece_of(int j) {
    if constexpr (Out == kInt8) return j * Threads + threadIdx.x;
    const int unit = j / 2 * Threads + threadIdx.x;
    return unit / 2 * 4 + unit % 2 + j % 2 * 2;
}

__device__ __forceinline__ uint4 load_piece(const void* from, long long piece) {
    return __ldg(static_cast<const uint4*>(from) + piece);
}

template <class T, class Operation>
__device__ __forceinline__ uint4 each_word(const uint4& a, const uint4& b, Operation operation) {
    return {operation(a.x, b.x), operation(a.y, b.y), operation(a.z, b.z), operation(a.w, b.w)};
}

// A thread's part of a row, zeros beyond its end: what is quantized, or what is normed.
template <class T, Kind What, Output Out, int Threads, int Pieces>
__device__ __forceinline__ void load_row(uint4 (&x)[Pieces], uint4 (&other)[Pieces], const Problem& p, int row) {
    const long long start = (long long)row * (p.n / 8) * (What == kGated ? 2 : 1);
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        const int piece = piece_of<Out, Threads>(j);
        x[j] = other[j] = {0, 0, 0, 0};
        if (row >= p.rows || 8 * piece >= p.n) continue;
        x[j] = load_piece(p.x, start + piece);
        if (What == kGated) other[j] = load_piece(p.x, start + p.n / 8 + piece);
        if (What == kNorm && p.residual) other[j] = load_piece(p.residual, start + piece);
    }
}

// The sum of squares of a warp's values: those of eight lanes' words are the diagonal of words times their transpose.
template <class T, int Pieces>
__device__ __forceinline__ float sum_of_squares(const uint4 (&x)[Pieces]) {
    float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        mma_16n8k16<T>(products, Signs{{x[j].x, 0, x[j].y, 0}}, x[j].x, x[j].y);
        mma_16n8k16<T>(products, Signs{{x[j].z, 0, x[j].w, 0}}, x[j].z, x[j].w);
    }
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    return g / 2 == t ? products[g % 2] : 0.0f;
}

// Values of this thread divided by the root mean square of the row, rounded, then times the weight.
template <class T, Output Out, int Threads, int Pieces>
__device__ __forceinline__ void normalize(const Problem& p, uint4 (&x)[Pieces], float* scratch) {
    using F = Float16<T>;
    const float squares = block_total<Threads / 32>(sum_of_squares<T>(x), scratch);
    const float factor = rsqrtf(fmaf(squares, fast_reciprocal(static_cast<float>(p.n)), p.eps));
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        const auto scaled = [&](unsigned word, unsigned) {
            const float2 pair = F::unpack(word);
            return F::pack(pair.x * factor, pair.y * factor);
        };
        x[j] = each_word<T>(x[j], x[j], scaled);
        const int piece = piece_of<Out, Threads>(j);
        if (p.weight && 8 * piece < p.n) x[j] = each_word<T>(load_piece(p.weight, piece), x[j], multiplied<T>);
    }
}

// Division by a scale, rounded as IEEE rounds it wherever that can be seen in a code of a 16-bit value: the reciprocal in
// two parts has 48 bits.
struct Divisor {
    float high, low;

    __device__ __forceinline__ explicit Divisor(float scale) {
        const float first = fast_reciprocal(scale);
        high = fmaf(first, fmaf(-first, scale, 1.0f), first);
        low = fmaf(-high, scale, 1.0f) * high;
    }

    // The low byte is the code of x, 128 more.
    __device__ __forceinline__ unsigned shifted(float x) const {
        return __float_as_uint(fmaf(x, high, x * low) + (kRounder + 128.0f));
    }
};

// Four bytes of codes, 128 more, of two words of values.
template <class T>
__device__ __forceinline__ unsigned shifted_codes(unsigned first, unsigned second, const Divisor& d) {
    const float2 a = Float16<T>::unpack(first), b = Float16<T>::unpack(second);
    return gather_bytes(d.shifted(a.x), d.shifted(a.y), d.shifted(b.x), d.shifted(b.y));
}

// `dynamic_scale`, by a multiplication and its correction wherever that rounds as a division does.
__device__ __forceinline__ float scale_of(float row_maximum, const Codes& q) {
    const float clipped = q.clip_ratio * row_maximum, largest = static_cast<float>(q.largest);
    if (clipped < 1e-30f) return dynamic_scale(row_maximum, q);
    const float first = fast_reciprocal(largest);
    return quotient(clipped, largest, fmaf(first, fmaf(-first, largest, 1.0f), first));
}

template <class T, Output Out, int Threads, int Pieces>
__device__ __forceinline__ void write_row(const uint4 (&x)[Pieces], const Problem& p, int row, float scale) {
    const Divisor divisor(scale);
    const float largest = static_cast<float>(p.codes.largest);
    // The bounds in 16 bits have the codes of the bounds, since these are at most 2^7 and T has 8 bits and more.
    const unsigned high = Float16<T>::pack(scale * largest, scale * largest);
    const unsigned low = Float16<T>::pack(-scale * (largest + 1.0f), -scale * (largest + 1.0f));
    char* out = static_cast<char*>(p.codes.codes) + (long long)row * p.columns / (Out == kInt4 ? 2 : 1);
    const auto codes_of_piece = [&](const uint4& v) {
        return uint2{shifted_codes<T>(clamped<T>(v.x, low, high), clamped<T>(v.y, low, high), divisor),
                     shifted_codes<T>(clamped<T>(v.z, low, high), clamped<T>(v.w, low, high), divisor)};
    };
#pragma unroll
    for (int j = 0; j < Pieces; j += Out == kInt4 ? 2 : 1) {
        const int piece = piece_of<Out, Threads>(j);
        const bool valid = 8 * piece < p.columns;
        const uint2 codes = codes_of_piece(x[j]);
        if constexpr (Out == kInt8) {
            store_if(out + 8 * piece, uint2{codes.x ^ 0x80808080u, codes.y ^ 0x80808080u}, valid);
        } else {
            const uint2 upper = codes_of_piece(x[j + 1]);
            const auto join = [](unsigned a, unsigned b) { return (a & 0x0F0F0F0Fu) | (b << 4 & 0xF0F0F0F0u); };
            store_if(out + piece / 4 * 16 + piece % 2 * 8, uint2{join(codes.x, upper.x), join(codes.y, upper.y)}, valid);
        }
    }
}

// Values and scale times 2^15 where the clamp's bounds would not be normal numbers of float16. A scale so small that every
// value but zero is clamped may be replaced by a larger one of which that is true.
template <class T, int Pieces>
__device__ __forceinline__ float away_from_zero(uint4 (&x)[Pieces], float scale, int largest) {
    if (!std::is_same_v<T, __half> || scale * static_cast<float>(largest) >= 6.103515625e-5f) return scale;
    const unsigned factor = Float16<T>::pack(32768.0f, 32768.0f);
#pragma unroll
    for (int j = 0; j < Pieces; ++j)
        x[j] = each_word<T>(x[j], x[j], [&](unsigned word, unsigned) { return multiplied<T>(word, factor); });
    return 32768.0f * fmaxf(scale, __fdividef(2.98023224e-8f, static_cast<float>(largest + 1)));
}

// The block's threads, a multiple of 32, times Pieces * 8 cover the columns. Blocks take one row after another.
template <class T, Kind What, Output Out, int Pieces, int Threads, int MinBlocks, bool Prefetch>
__global__ void __launch_bounds__(Threads, MinBlocks) quantize_rows_16(const Problem p) {
    alignas(16) __shared__ float scratch[4][32];  // two of each kind, so that rows need no barrier between them
    uint4 x[Pieces], other[Pieces];
    load_row<T, What, Out, Threads>(x, other, p, blockIdx.x);
    int use = 0;
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x, use ^= 1) {
        if (What == kGated) {
#pragma unroll
            for (int j = 0; j < Pieces; ++j) x[j] = each_word<T>(x[j], other[j], gated_pair<T>);
        }
        if (What == kNorm && p.residual) {
            uint4* hidden = static_cast<uint4*>(p.hidden) + (long long)row * (p.n / 8);
#pragma unroll
            for (int j = 0; j < Pieces; ++j) {
                x[j] = each_word<T>(x[j], other[j], added<T>);
                store_if(hidden + piece_of<Out, Threads>(j), x[j], 8 * piece_of<Out, Threads>(j) < p.n);
            }
        }
        uint4 next[Pieces];
        if constexpr (Prefetch) load_row<T, What, Out, Threads>(next, other, p, row + gridDim.x);
        if constexpr (What == kNorm) normalize<T, Out, Threads>(p, x, scratch[use]);

        float scale;
        if (p.codes.static_scale) {
            scale = *p.codes.static_scale;
        } else {
            unsigned largest = 0;
#pragma unroll
            for (int j = 0; j < Pieces; ++j) {
                const unsigned words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) largest = larger_magnitudes<T>(largest, words[i]);
            }
            const float2 pair = Float16<T>::unpack(largest);
            scale = scale_of(block_largest<Threads / 32>(fmaxf(pair.x, pair.y), scratch[2 + use]), p.codes);
        }
        if (threadIdx.x == 0 && (row == 0 || !p.codes.static_scale)) p.codes.scale[row] = scale;
        write_row<T, Out, Threads>(x, p, row, away_from_zero<T>(x, scale, p.codes.largest));
        if constexpr (Prefetch) {
#pragma unroll
            for (int j = 0; j < Pieces; ++j) x[j] = next[j];
        } else {
            load_row<T, What, Out, Threads>(x, other, p, row + gridDim.x);
        }
    }
}

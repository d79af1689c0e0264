// 16-bit rows to integers without a transform: plain, after SwiGLU, or after RMSNorm with a residual added (QuaRot
// Sec. 4).
//
// One block holds one row in registers, two values to a word as they came. Squares are summed on tensor cores, where
// products of 16-bit values are exact; the sum and the largest magnitude of a row cross the block together. float32
// rows go to activations.cu. Architectures: sm_80 and newer.
#include "values/element.cuh"
#include "mma/warp.cuh"
#include "values/reduce.cuh"
#include "activations/rows.cuh"

template <class T>
__device__ __forceinline__ u32 added(u32 a, u32 b) {
    return on_pairs<T>(a, b, [](auto x, auto y) { return __hadd2(x, y); });
}

template <class T>
__device__ __forceinline__ u32 larger_magnitudes(u32 a, u32 b) {
    return on_pairs<T>(a, b, [](auto x, auto y) { return __hmax2(x, __habs2(y)); });
}

template <class T>
__device__ __forceinline__ u32 clamped(u32 x, u32 low, u32 high) {
    const u32 y = on_pairs<T>(x, low, [](auto a, auto b) { return __hmax2(a, b); });
    return on_pairs<T>(y, high, [](auto a, auto b) { return __hmin2(a, b); });
}

// A thread's part of a row: `Pieces` of 16 bytes, at distances known to the compiler within the span of its warp.
// Lanes' pieces lie side by side; for packed codes every second one lies 16 values after the one before, so that one
// thread holds both halves of each byte.
template <Output Out, int Pieces>
struct Part {
    static __device__ __forceinline__ int first() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return warp * 32 * Pieces + (Out == kInt8 ? lane : lane / 2 * 4 + lane % 2);
    }
    // Pieces between the first and piece j.
    static constexpr __device__ int distance(int j) { return Out == kInt8 ? 32 * j : j / 2 * 64 + j % 2 * 2; }
};

// The thread's part of a row of n values at `from`, zeros beyond its end.
template <Output Out, int Pieces>
__device__ __forceinline__ void load_row(uint4 (&x)[Pieces], const void* from, long long start, int n) {
    using Own = Part<Out, Pieces>;
    const int first = Own::first(), left = n - 8 * first;
    const uint4* row = static_cast<const uint4*>(from) + start / 8 + first;
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        x[j] = {0, 0, 0, 0};
        if (8 * Own::distance(j) < left) x[j] = __ldg(row + Own::distance(j));
    }
}

// Write it to `to`.
template <Output Out, int Pieces>
__device__ __forceinline__ void store_row(const uint4 (&x)[Pieces], void* to, long long start, int n) {
    using Own = Part<Out, Pieces>;
    const int first = Own::first(), left = n - 8 * first;
    uint4* row = static_cast<uint4*>(to) + start / 8 + first;
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        if (8 * Own::distance(j) < left) row[Own::distance(j)] = x[j];
    }
}

// The sum of squares of a warp's values: those of eight lanes' words are the diagonal of words times their transpose.
template <class T, int Pieces>
__device__ __forceinline__ float sum_of_squares(const uint4 (&x)[Pieces]) {
    float first[4] = {0.0f, 0.0f, 0.0f, 0.0f}, second[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        ptx::mma_m16n8k8<T>(first, x[j].x, x[j].y, x[j].x);
        ptx::mma_m16n8k8<T>(second, x[j].x, x[j].y, x[j].y);
        ptx::mma_m16n8k8<T>(first, x[j].z, x[j].w, x[j].z);
        ptx::mma_m16n8k8<T>(second, x[j].z, x[j].w, x[j].w);
    }
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float own = g % 2 ? first[1] + second[3] : first[0] + second[2];
    return warp_reduce<Sum>(g / 2 == t ? own : 0.0f);
}

// The largest magnitude of a warp's values.
template <class T, int Pieces>
__device__ __forceinline__ float largest_magnitude(const uint4 (&x)[Pieces]) {
    u32 largest = 0;
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        const u32 words[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = larger_magnitudes<T>(largest, words[i]);
    }
    const float2 pair = Float16<T>::unpack(largest);
    return warp_largest(fmaxf(pair.x, pair.y));
}

// What a row's scale and norm follow from.
struct Statistics {
    float largest, squares;
};

// Those of the block from those of its warps. `scratch`: one for each warp, used once.
template <bool Squares>
__device__ __forceinline__ Statistics over_block(Statistics own, Statistics* scratch) {
    if (blockDim.x == 32) return own;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = own;
    __syncthreads();
    own = lane < blockDim.x / 32 ? scratch[lane] : Statistics{0.0f, 0.0f};
    return {warp_largest(own.largest), Squares ? warp_reduce<Sum>(own.squares) : 0.0f};
}

// Normalize the thread's part of a row, rounding before and after the weight; returns the row's largest magnitude.
template <class T, Output Out, int Pieces>
__device__ __forceinline__ float normalize(const Problem& p, uint4 (&x)[Pieces], Statistics (&scratch)[2][32]) {
    using F = Float16<T>;
    const Statistics row = over_block<true>({largest_magnitude<T>(x), sum_of_squares<T>(x)}, scratch[0]);
    const float factor = rsqrtf(fmaf(row.squares, ptx::fast_reciprocal(static_cast<float>(p.n)), p.eps));
#pragma unroll
    for (int j = 0; j < Pieces; ++j) {
        x[j] = each_word(x[j], x[j], [&](u32 word, u32) {
            const float2 pair = F::unpack(word);
            return F::pack(pair.x * factor, pair.y * factor);
        });
    }
    // Rounding keeps order, so the largest value becomes the largest.
    if (!p.weight) return rounded<T>(row.largest * factor);
    uint4 weight[Pieces];
    load_row<Out>(weight, p.weight, 0, p.n);
#pragma unroll
    for (int j = 0; j < Pieces; ++j) x[j] = each_word(x[j], weight[j], multiplied<T>);
    return over_block<false>({largest_magnitude<T>(x), 0.0f}, scratch[1]).largest;
}

// 1 / scale of a normal scale, rounded once or next to it.
__device__ __forceinline__ float reciprocal(float scale) {
    const float first = ptx::fast_reciprocal(scale);
    return fmaf(first, fmaf(-first, scale, 1.0f), first);
}

// Codes of values that are exact: division by the scale, rounded as IEEE rounds it wherever that can be seen in a code
// of a 16-bit value, since the reciprocal in two parts has 48 bits.
template <class T>
struct Division {
    float high, low;

    __device__ __forceinline__ explicit Division(float scale) : high(reciprocal(scale)) {
        low = fmaf(-high, scale, 1.0f) * high;
    }
    // The low bytes are the codes of two words' values.
    __device__ __forceinline__ void operator()(float (&codes)[4], u32 first, u32 second) const {
        const float2 a = Float16<T>::unpack(first), b = Float16<T>::unpack(second);
        const float x[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = fmaf(x[i], high, x[i] * low) + kRounder;
    }
};

// How many 16-bit numbers hold a reciprocal.
template <class T>
constexpr int kParts = 2;

template <>
constexpr int kParts<__nv_bfloat16> = 3;

// Codes of values that were rounded to 16 bits on the way: multiplication by the scale's reciprocal on tensor cores, as
// products with diagonal matrices that hold parts of it, 22 bits and more in all.
template <class T>
struct Multiplication {
    u32 parts[kParts<T>];

    __device__ __forceinline__ explicit Multiplication(float scale) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const u32 own = g / 2 == t ? (g % 2 ? 0xFFFF0000u : 0x0000FFFFu) : 0u;
        float rest = reciprocal(scale);
#pragma unroll
        for (int i = 0; i < kParts<T>; ++i) {
            parts[i] = Float16<T>::pack(rest, rest) & own;
            rest -= rounded<T>(rest);
        }
    }
    __device__ __forceinline__ void operator()(float (&codes)[4], u32 first, u32 second) const {
        float products[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = kParts<T> - 1; i >= 0; --i) ptx::mma_m16n8k8<T>(products, first, second, parts[i]);
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[i] = products[i] + kRounder;
    }
};

// `dynamic_scale`, by a multiplication and its correction wherever that rounds as a division does.
__device__ __forceinline__ float scale_of(float row_maximum, const Codes& q) {
    const float clipped = q.clip_ratio * row_maximum, largest = static_cast<float>(q.largest);
    return clipped < 1e-30f ? dynamic_scale(row_maximum, q) : quotient(clipped, largest, reciprocal(largest));
}

// Values and scale times 2^15 where the clamp's bounds or the reciprocal would leave float16's normal numbers. A scale
// so small that every value but zero is clamped may be replaced by a larger one of which that is true.
template <int Pieces>
__device__ __forceinline__ float away_from_zero(uint4 (&x)[Pieces], float scale, int largest, __half) {
    if (scale >= 6.103515625e-5f) return scale;
    const u32 factor = Float16<__half>::pack(32768.0f, 32768.0f);
#pragma unroll
    for (int j = 0; j < Pieces; ++j)
        x[j] = each_word(x[j], x[j], [&](u32 word, u32) { return multiplied<__half>(word, factor); });
    return 32768.0f * fmaxf(scale, __fdividef(5.97e-8f, static_cast<float>(largest + 1)));  // a little above 2^-24
}

template <int Pieces>
__device__ __forceinline__ float away_from_zero(uint4 (&)[Pieces], float scale, int, __nv_bfloat16) {
    return scale;
}

template <class T, class ToCodes, Output Out, int Pieces>
__device__ __forceinline__ void write_row(const uint4 (&x)[Pieces], const Codes& q, int columns, float scale) {
    const ToCodes to_codes(scale);
    const float largest = static_cast<float>(q.largest);
    // The bounds in 16 bits have the codes of the bounds, since these are at most 2^7 and T has 8 bits and more.
    const u32 high = Float16<T>::pack(scale * largest, scale * largest);
    const u32 low = Float16<T>::pack(-scale * (largest + 1.0f), -scale * (largest + 1.0f));
    const auto codes_of_words = [&](u32 first, u32 second) {
        float c[4];
        to_codes(c, clamped<T>(first, low, high), clamped<T>(second, low, high));
        return gather_bytes(__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]), __float_as_uint(c[3]));
    };
    const auto codes_of_piece = [&](const uint4& v) {
        return uint2{codes_of_words(v.x, v.y), codes_of_words(v.z, v.w)};
    };
    using Own = Part<Out, Pieces>;
    const int first = Own::first(), left = columns - 8 * first;
    char* out = static_cast<char*>(q.codes) + (long long)blockIdx.x * columns / (Out == kInt4 ? 2 : 1);
    out += Out == kInt4 ? first / 4 * 16 + first % 2 * 8 : 8 * first;
#pragma unroll
    for (int j = 0; j < Pieces; j += Out == kInt4 ? 2 : 1) {
        const bool valid = 8 * Own::distance(j) < left;
        const uint2 codes = codes_of_piece(x[j]);
        if constexpr (Out == kInt8) {
            ptx::store_if(out + 8 * Own::distance(j), codes, valid);
        } else {
            const uint2 upper = codes_of_piece(x[j + 1]);
            const auto join = [](u32 a, u32 b) { return (a & 0x0F0F0F0Fu) | (b << 4 & 0xF0F0F0F0u); };
            ptx::store_if(out + 4 * Own::distance(j), uint2{join(codes.x, upper.x), join(codes.y, upper.y)}, valid);
        }
    }
}

// The block's threads, a multiple of 32, times Pieces * 8 cover the columns.
template <class T, Kind What, Output Out, int Pieces>
__global__ void __launch_bounds__(1024) quantize_rows_16(const Problem p) {
    ptx::follow_previous_launch();
    constexpr bool kNormed = What == kNorm || What == kSumNorm;
    __shared__ Statistics scratch[2][32];
    const long long row = blockIdx.x, start = row * p.n;
    const bool is_static = p.codes.static_scale != nullptr;
    float scale = is_static ? *p.codes.static_scale : 0.0f;  // early: nothing waits for it then
    uint4 x[Pieces];
    load_row<Out>(x, p.x, What == kGated ? 2 * start : start, p.n);
    if constexpr (What == kGated || What == kSumNorm) {
        uint4 other[Pieces];
        load_row<Out>(other, What == kGated ? p.x : p.residual, What == kGated ? 2 * start + p.n : start, p.n);
#pragma unroll
        for (int j = 0; j < Pieces; ++j) x[j] = each_word(x[j], other[j], What == kGated ? gated_pair<T> : added<T>);
    }
    if constexpr (What == kSumNorm) store_row<Out>(x, p.hidden, start, p.n);

    float maximum = 0.0f;
    if constexpr (kNormed) {
        maximum = normalize<T, Out>(p, x, scratch);
    } else if (!is_static) {
        maximum = over_block<false>({largest_magnitude<T>(x), 0.0f}, scratch[0]).largest;
    }
    if (!is_static) scale = scale_of(maximum, p.codes);
    if (threadIdx.x == 0 && (row == 0 || !is_static)) p.codes.scale[row] = scale;
    scale = away_from_zero(x, scale, p.codes.largest, T{});
    if constexpr (kNormed) {
        write_row<T, Multiplication<T>, Out>(x, p.codes, p.columns, scale);
    } else {
        write_row<T, Division<T>, Out>(x, p.codes, p.columns, scale);
    }
}

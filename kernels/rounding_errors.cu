// Rounding errors of rows that share a dynamic scale each: what learning a rotation takes of every activation, and of
// weights. Bound by memory: a row is read once, for its ends, and kept in registers until its scale is known;
// the part of a long row that does not fit is read again, from L1 or L2. Scales and codes are those of
// tensors/quantization.py in float32, each operation rounded as torch rounds it on a GPU: nothing may be contracted.
// sm_80 and newer.

#include "values/element.cuh"
#include "values/extremes.cuh"

namespace {

constexpr int kThreads = 128, kWarp = 32;
// Values that a thread reads at once, and how many such pieces of its row it keeps.
constexpr int kPiece = 8, kHeld = 6;
constexpr float kTiny = 1.17549435e-38f;  // the smallest normal number
constexpr float kEpsilon = 1.f / 8388608;  // the last bit of 1

// Codes without a zero point, with a whole one in a range that includes zero, or with an exact one (SpinQuant Eq. 1).
enum ZeroPoint : int { kNone, kWhole, kExact };

// How codes are found: their ends, one over the steps that a range has, and how much of it is kept.
struct Codes {
    float smallest, largest, inverse_steps, clip;
    int zero_point;
};

// The ends of a row's values. What is no number makes both of them none, as in torch.
struct Range {
    float least = __uint_as_float(0x7F800000u), most = __uint_as_float(0xFF800000u);  // infinities

    __device__ __forceinline__ void widen(float low, float high) {
        least = minimum(least, low), most = maximum(most, high);
    }
    __device__ __forceinline__ void widen(const float (&x)[kPiece]) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) widen(x[i], x[i]);
    }
    // Over the `Team` threads that share a row: neighbouring lanes of a warp, or a block.
    template <int Team>
    __device__ __forceinline__ void share() {
#pragma unroll
        for (int mask = (Team < kWarp ? Team : kWarp) / 2; mask; mask /= 2)
            widen(__shfl_xor_sync(0xFFFFFFFFu, least, mask), __shfl_xor_sync(0xFFFFFFFFu, most, mask));
        if constexpr (Team > kWarp) {
            __shared__ float ends[2][kThreads / kWarp];
            if (threadIdx.x % kWarp == 0) ends[0][threadIdx.x / kWarp] = least, ends[1][threadIdx.x / kWarp] = most;
            __syncthreads();
#pragma unroll
            for (int warp = 0; warp < kThreads / kWarp; ++warp) widen(ends[0][warp], ends[1][warp]);
        }
    }
};

// What a row's values are rounded by.
struct Rounding {
    float scale, zero_point;
    float before, after;  // the zero point, where it is added to x / scale before rounding, or to the code

    // Division by a number is multiplication by its reciprocal in torch's CUDA operators; tensors are divided.
    __device__ __forceinline__ Rounding(Range range, const Codes& codes) {
        float low = range.least, high = range.most;
        if (codes.zero_point == kWhole) low = minimum(low, 0.f), high = maximum(high, 0.f);
        const float span = codes.zero_point == kNone ? maximum(high, -low) : __fsub_rn(high, low);
        scale = __fmul_rn(__fmul_rn(codes.clip, span), codes.inverse_steps);
        const float largest = codes.zero_point == kExact ? maximum(fabsf(high), fabsf(low)) : 0.f;
        scale = maximum(scale, __fadd_rn(__fmul_rn(kEpsilon, largest), kTiny));
        const float exact = __fdiv_rn(__fmul_rn(-codes.clip, low), scale);
        zero_point = codes.zero_point == kNone ? 0.f : codes.zero_point == kWhole ? rintf(exact) : exact;
        before = codes.zero_point == kExact ? zero_point : 0.f;
        after = codes.zero_point == kExact ? 0.f : zero_point;
    }

    // x rounded to its code and back.
    __device__ __forceinline__ float of(float x, const Codes& codes) const {
        const float code = __fadd_rn(rintf(__fadd_rn(__fdiv_rn(x, scale), before)), after);
        // not fminf and fmaxf: as in torch, what is no number stays none
        const float kept = minimum(maximum(code, codes.smallest), codes.largest);
        return __fmul_rn(__fsub_rn(kept, zero_point), scale);
    }
};

// A thread's pieces of its row of n values: eight neighbours where n is a multiple of eight, else every Team-th value.
// Where the row has ended its last values are read once more, which changes no range, and nothing is written.
template <class T, int Team, bool Neighbours>
struct Columns {
    static constexpr int kStep = Team * kPiece;

    static __device__ __forceinline__ void load(const T* row, int begin, int n, float (&x)[kPiece]) {
        const int thread = threadIdx.x % Team;
        if constexpr (Neighbours) {
            load_8(row + min(begin + thread * kPiece, n - kPiece), x);
        } else {
#pragma unroll
            for (int i = 0; i < kPiece; ++i)
                x[i] = static_cast<float>(__ldg(row + min(begin + thread + i * Team, n - 1)));
        }
    }

    static __device__ __forceinline__ void store(T* row, int begin, int n, const float (&x)[kPiece]) {
        const int thread = threadIdx.x % Team;
        if constexpr (Neighbours) {
            if (begin + thread * kPiece < n) store_8(row + begin + thread * kPiece, x);
        } else {
#pragma unroll
            for (int i = 0; i < kPiece; ++i)
                if (begin + thread + i * Team < n) row[begin + thread + i * Team] = static_cast<T>(x[i]);
        }
    }
};

}  // namespace

// out [rows, n]: x rounded to codes and back, in T, less x, rounded to T once more. Each row has its own scale, and how
// much of its range is kept is its own too where `clips` is there. A row that holds what is no number, or is infinite,
// gives none where torch does. Zeros may have another sign than torch's. n at least 1.
template <class T, int Team, bool Neighbours>
__global__ void __launch_bounds__(kThreads)
    rounding_errors(const T* x, float smallest, float largest, float inverse_steps, const float* clips, float clip,
                    int zero_point, long long rows, int n, T* out) {
    using At = Columns<T, Team, Neighbours>;
    const long long row = static_cast<long long>(blockIdx.x) * (kThreads / Team) + threadIdx.x / Team;
    const bool there = row < rows;  // shuffles need whole warps
    x += (there ? row : rows - 1) * n, out += row * n;

    Range range;
    float held[kHeld][kPiece];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (i * At::kStep < n) At::load(x, i * At::kStep, n, held[i]);
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (i * At::kStep < n) range.widen(held[i]);
    for (int begin = kHeld * At::kStep; begin < n; begin += At::kStep) {
        float piece[kPiece];
        At::load(x, begin, n, piece);
        range.widen(piece);
    }
    range.share<Team>();
    if (!there) return;

    const Codes codes{smallest, largest, inverse_steps, clips != nullptr ? clips[row] : clip, zero_point};
    const Rounding rounding(range, codes);
    const auto write = [&](int begin, float (&piece)[kPiece]) {
#pragma unroll
        for (int i = 0; i < kPiece; ++i) piece[i] = __fsub_rn(rounded<T>(rounding.of(piece[i], codes)), piece[i]);
        At::store(out, begin, n, piece);
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (i * At::kStep < n) write(i * At::kStep, held[i]);
    for (int begin = kHeld * At::kStep; begin < n; begin += At::kStep) {
        float piece[kPiece];
        At::load(x, begin, n, piece);
        write(begin, piece);
    }
}

// The clip ratio of least rounding error for each row of values that share a scale (QuaRot Sec. 5), of the candidates
// 1.00, 0.99, ... 0.21. Bound by arithmetic: a warp has a row and each lane keeps some candidates' scales and sums in
// registers, so that a value is read once for all of a lane's, and rows of any length need no shared memory and no
// barrier. Scales and codes are those of tensors/quantization.py in float32, as torch computes them on a GPU. sm_80 and
// newer.

#include "values/extremes.cuh"

namespace {

constexpr int kThreads = 64, kWarp = 32;  // small blocks: weights of few rows still reach all multiprocessors
constexpr int kCandidates = 80;
// Lanes over the candidates, and candidates of a lane. The two halves of a warp have every other value of the row.
constexpr int kLanes = 16, kHeld = kCandidates / kLanes, kShares = kWarp / kLanes;
static_assert(kLanes * kHeld == kCandidates, "no lane idles");
// Values of a half that are added up before the sum goes to the row's: float32 keeps the digits of rows of thousands.
constexpr int kChunk = 64;
// float32 near it holds whole numbers alone, so adding it rounds, halves to even.
constexpr float kWhole = 12582912.f;
constexpr float kTiny = 1.17549435e-38f;  // the smallest normal number
constexpr u32 kAllLanes = 0xFFFFFFFFu;

// The ends of a row's values.
struct Range {
    float least, most;
};

// How codes are found: their ends, and one over the steps that a range has.
struct Codes {
    float smallest, largest, inverse_steps;
    int symmetric;
};

// Division by a number is multiplication by its reciprocal in torch's CUDA operators.
__device__ __forceinline__ float ratio_of(int candidate) {
    return __fsub_rn(1.f, __fmul_rn(static_cast<float>(candidate), 1.f / 100));
}

// A candidate's scale, and the ends of code less zero point.
struct Candidate {
    float scale, inverse, lowest, highest;

    Candidate() = default;
    __device__ __forceinline__ Candidate(float ratio, Range range, Codes codes) {
        // not fmaxf: as in torch, what is no number stays none
        const float low = range.least > 0.f ? 0.f : range.least, high = range.most < 0.f ? 0.f : range.most;
        const float span = codes.symmetric ? maximum(range.most, -range.least) : __fsub_rn(high, low);
        scale = __fmul_rn(__fmul_rn(ratio, span), codes.inverse_steps);
        scale = scale < kTiny ? kTiny : scale;
        inverse = __fdiv_rn(1.f, scale);
        const float zero_point = codes.symmetric ? 0.f : rintf(__fdiv_rn(__fmul_rn(-ratio, low), scale));
        lowest = codes.smallest - zero_point, highest = codes.largest - zero_point;
    }

    // x's rounding error. The reciprocal moves only values on the tie between two codes, which are as far from one as
    // from the other. The zero point is whole, so it may be added after rounding or, as here, be left out.
    __device__ __forceinline__ float error(float x) const {
        const float code = fminf(fmaxf(fmaf(x, inverse, kWhole), kWhole + lowest), kWhole + highest) - kWhole;
        return fmaf(-code, scale, x);
    }
};

__device__ __forceinline__ Range range_of(const float* x, int n) {
    Range range{__ldg(x), __ldg(x)};
    for (int column = threadIdx.x % kWarp; column < n; column += kWarp) {
        const float value = __ldg(x + column);
        range.least = minimum(range.least, value), range.most = maximum(range.most, value);
    }
#pragma unroll
    for (int mask = kWarp / 2; mask; mask /= 2) {
        range.least = minimum(range.least, __shfl_xor_sync(kAllLanes, range.least, mask));
        range.most = maximum(range.most, __shfl_xor_sync(kAllLanes, range.most, mask));
    }
    return range;
}

}  // namespace

// ratios [rows]: of the candidates for x [rows, n] the one with the least sum |error|^norm, of equal ones the largest.
// A row that holds what is no number, or infinite, has no least error and gets 1. Squares: norm is 2. n at least 1.
template <bool Squares>
__global__ void __launch_bounds__(kThreads)
    best_ratios(const float* x, float smallest, float largest, float inverse_steps, int symmetric, float norm,
                long long rows, int n, float* ratios) {
    const long long row = static_cast<long long>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
    if (row >= rows) return;  // a whole warp
    const int lane = threadIdx.x % kLanes, share = threadIdx.x % kWarp / kLanes;
    x += row * n;
    const Range range = range_of(x, n);
    const Codes codes{smallest, largest, inverse_steps, symmetric};
    // Logarithms keep most digits near 1: errors are in steps of the range that is not clipped.
    const float unit = Candidate(1.f, range, codes).inverse;
    Candidate candidates[kHeld];
    float sums[kHeld] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) candidates[i] = Candidate(ratio_of(lane + i * kLanes), range, codes);

    for (int begin = share; begin < n; begin += kShares * kChunk) {
        const int end = min(n, begin + kShares * kChunk);
        float parts[kHeld] = {};
#pragma unroll 4
        for (int column = begin; column < end; column += kShares) {
            const float value = __ldg(x + column);
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
                const float error = candidates[i].error(value);
                parts[i] = Squares ? fmaf(error, error, parts[i]) : parts[i] + __powf(fabsf(error) * unit, norm);
            }
        }
#pragma unroll
        for (int i = 0; i < kHeld; ++i) sums[i] += parts[i];
    }

    float least = __uint_as_float(0x7F800000u);  // infinity
    int best = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const float sum = sums[i] + __shfl_xor_sync(kAllLanes, sums[i], kLanes);
        if (sum < least) least = sum, best = lane + i * kLanes;
    }
#pragma unroll
    for (int mask = kLanes / 2; mask; mask /= 2) {
        const float other = __shfl_xor_sync(kAllLanes, least, mask);
        const int place = __shfl_xor_sync(kAllLanes, best, mask);
        if (other < least || (other == least && place < best)) least = other, best = place;
    }
    if (threadIdx.x % kWarp == 0) ratios[row] = ratio_of(best);
}

// Quantizers of a group of weights, as rotquant/tensors/{extents,partition,normal_float}.py have them. Made from the
// group's extremes and parameters, one gives the value of each weight; the same with a gradient gathers what the group's
// gradients are made of, and makes them.
//
// Whatever decides a code or is a value rounds as torch does on a GPU, one operation at a time: intrinsics with _rn are
// never contracted. Gradients round as they like.
#pragma once

#include "values/extremes.cuh"

constexpr float kTiny = 1.17549435e-38f, kEpsilon = 1.1920929e-7f;

enum Kind : int { kRange, kLearnedRange, kLdp, kN2uq, kNf3, kNf3Ldp };
// What stands in for the derivative of a partition's step, see `ldp`.
enum StraightThrough : int { kStep, kRamp };

// A kind has so many of gamma, beta, s1, s2, the first ones.
template <Kind K>
constexpr int kParameters = K == kRange || K == kNf3 ? 0
                            : K == kLearnedRange     ? 2
                            : K == kNf3Ldp           ? 3
                                                     : 4;

// What is known of a group: its extremes, and sigmoids of its parameters.
struct Group {
    float least, most;
    float shares[4];
};

// Gradients of the extremes and of the parameters; those that a kind lacks stay zero.
struct GroupGradient {
    float least = 0.f, most = 0.f;
    float parameters[4] = {};
};

struct NormalFloat {
    float v0, v1, v2, v3, v4, v5, v6, v7;
};

// What belongs to no group.
struct Grid {
    float largest_code, step;  // uniform: 2^bits - 1, and one over it
    NormalFloat values;        // ascending, three of them below zero
};

__device__ __forceinline__ float sigmoid_slope(float share) { return share * (1.f - share); }

// low and high, Eqs. 1 and 5; zero lies inside of NormalFloat's range if it is not learned.
template <Kind K>
struct Extent {
    static constexpr bool kClipped = kParameters<K> != 0;

    float low, high;

    __device__ __forceinline__ explicit Extent(const Group& group) {
        low = group.least, high = group.most;
        if constexpr (K == kNf3) low = minimum(low, 0.f), high = maximum(high, 0.f);
        if constexpr (kClipped) low = __fmul_rn(group.shares[1], low), high = __fmul_rn(group.shares[0], high);
    }

    // An empty range gets the smallest positive number.
    __device__ __forceinline__ float span() const { return maximum(__fsub_rn(high, low), kTiny); }

    __device__ __forceinline__ static void backward(const Group& group, float to_low, float to_high,
                                                    GroupGradient& gradient) {
        gradient.least = to_low, gradient.most = to_high;
        if constexpr (K == kNf3) {
            if (group.least > 0.f) gradient.least = 0.f;
            if (group.most < 0.f) gradient.most = 0.f;
        }
        if constexpr (kClipped) {
            const float high = group.shares[0], low = group.shares[1];
            gradient.parameters[0] = to_high * group.most * sigmoid_slope(high);
            gradient.parameters[1] = to_low * group.least * sigmoid_slope(low);
            gradient.least *= low, gradient.most *= high;
        }
    }
};

// ---- codes at equal distances, Eq. 1; rounding has derivative one ----

template <Kind K>
struct Uniform {
    static constexpr int kSums = 2;  // to the scale; gradients outside the range

    Extent<K> extent;
    float largest, step, scale, reciprocal, zero_point;
    bool wide;

    __device__ __forceinline__ Uniform(const Group& group, const Grid& grid) : extent(group) {
        largest = grid.largest_code, step = grid.step;
        const float furthest = maximum(fabsf(extent.low), fabsf(extent.high));
        const float least = __fadd_rn(__fmul_rn(kEpsilon, furthest), kTiny);
        const float exact = __fmul_rn(__fsub_rn(extent.high, extent.low), step);
        wide = exact > least;
        scale = maximum(exact, least);
        reciprocal = __frcp_rn(scale);
        zero_point = -rintf(__fdiv_rn(extent.low, scale));
    }

    // As IEEE division rounds it, from the rounded reciprocal (Markstein).
    __device__ __forceinline__ float ratio(float w) const {
        const float q = __fmul_rn(w, reciprocal);
        return __fmaf_rn(__fmaf_rn(-q, scale, w), reciprocal, q);
    }
    __device__ __forceinline__ float code(float ratio) const { return __fadd_rn(rintf(ratio), zero_point); }
    __device__ __forceinline__ float clamped(float code) const { return fminf(fmaxf(code, 0.f), largest); }

    __device__ __forceinline__ float value(float w) const {
        return __fmul_rn(__fsub_rn(clamped(code(ratio(w))), zero_point), scale);
    }

    __device__ __forceinline__ float direct(float w, float g) const {
        const float c = code(ratio(w));
        return c == clamped(c) ? g : 0.f;
    }

    __device__ __forceinline__ void gather(float w, float g, float (&sums)[kSums]) const {
        const float r = ratio(w), c = code(r), v = clamped(c);
        const bool inside = c == v;
        sums[0] = fmaf(g, v - zero_point - (inside ? r : 0.f), sums[0]);
        if (!inside) sums[1] += g;
    }

    __device__ __forceinline__ GroupGradient backward(const Group& group, const float (&sums)[kSums]) const {
        // What lies outside moves by -scale with the zero point, which is -low / scale.
        const float to_scale = sums[0] - sums[1] * extent.low * reciprocal;
        const float to_range = wide ? to_scale * step : 0.f;
        GroupGradient gradient;
        Extent<K>::backward(group, sums[1] - to_range, to_range, gradient);
        return gradient;
    }
};

// ---- learnable direct partitioning, Eqs. 7 to 11; N2UQ's levels lie at equal distances ----

template <Kind K>
struct Partition {
    Extent<K> extent;
    float span, top;  // top: the end of the range, also of an empty one
    float p[3], t[3], w[4], d[3], edges[3], levels[4];

    __device__ __forceinline__ Partition(const Group& group, const Grid&) : extent(group) {
        span = extent.span(), top = maximum(extent.low, extent.high);
        const float first = group.shares[2], second = group.shares[3], rest = __fsub_rn(1.f, first);
        p[0] = first, p[1] = __fmul_rn(rest, second), p[2] = __fmul_rn(rest, __fsub_rn(1.f, second));
        float end = 0.f;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            end = __fadd_rn(end, p[i]);
            t[i] = __fsub_rn(end, 0.5f * p[i]);
        }
        w[0] = 0.f, w[1] = 1.f / 3.f, w[2] = 2.f / 3.f, w[3] = 1.f;
        if constexpr (K == kLdp) w[1] = 0.5f * __fadd_rn(t[0], t[1]), w[2] = 0.5f * __fadd_rn(t[1], t[2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) levels[i] = __fadd_rn(extent.low, __fmul_rn(span, w[i]));
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            d[i] = w[i + 1] - w[i];
            edges[i] = __fadd_rn(extent.low, __fmul_rn(span, t[i]));
        }
    }

    __device__ __forceinline__ float value(float x) const {
        float level = x > edges[0] ? levels[1] : levels[0];
        level = x > edges[1] ? levels[2] : level;
        return x > edges[2] ? levels[3] : level;
    }

    // From the gradients of low, high, d_i (over the span, like the others), t_i and p_i.
    __device__ __forceinline__ GroupGradient backward(const Group& group, float to_low, float to_high,
                                                      const float (&to_d)[3], float (&to_t)[3],
                                                      const float (&to_p)[3]) const {
        if constexpr (K == kLdp) {
            to_t[0] += 0.5f * (to_d[0] - to_d[1]);
            to_t[1] += 0.5f * (to_d[0] - to_d[2]);
            to_t[2] += 0.5f * (to_d[1] - to_d[2]);
        }
        // A partition moves every later threshold as a whole, its own by half.
        const float first = to_p[0] + 0.5f * to_t[0] + to_t[1] + to_t[2];
        const float second = to_p[1] + 0.5f * to_t[1] + to_t[2], third = to_p[2] + 0.5f * to_t[2];
        const float share1 = group.shares[2], share2 = group.shares[3];
        GroupGradient gradient;
        Extent<K>::backward(group, to_low, to_high, gradient);
        gradient.parameters[2] = span * (first - share2 * second - (1.f - share2) * third) * sigmoid_slope(share1);
        gradient.parameters[3] = span * (1.f - share1) * (second - third) * sigmoid_slope(share2);
        return gradient;
    }
};

// Steps of derivative one everywhere.
template <Kind K>
struct Steps : Partition<K> {
    static constexpr int kSums = 7;  // of gradients: above each edge, all; times x; above the range, below it

    float slope;

    __device__ __forceinline__ Steps(const Group& group, const Grid& grid) : Partition<K>(group, grid) {
        slope = __fdividef(1.f, this->span);
    }

    __device__ __forceinline__ float direct(float x, float g) const {
        return x < this->extent.low || x > this->top ? 0.f : g;
    }

    __device__ __forceinline__ void gather(float x, float g, float (&sums)[kSums]) const {
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (x > this->edges[i]) sums[i] += g;
        sums[3] += g;
        sums[4] = fmaf(g, __saturatef((x - this->extent.low) * slope), sums[4]);
        if (x > this->top) sums[5] += g;
        if (x < this->extent.low) sums[6] += g;
    }

    __device__ __forceinline__ GroupGradient backward(const Group& group, const float (&sums)[kSums]) const {
        const float(&d)[3] = this->d;
        const float error = sums[0] * d[0] + sums[1] * d[1] + sums[2] * d[2] - sums[4];  // of y - x
        const float to_d[3] = {sums[0], sums[1], sums[2]}, to_p[3] = {};
        float to_t[3] = {-d[0] * sums[3], -d[1] * sums[3], -d[2] * sums[3]};
        return Partition<K>::backward(group, sums[6] - error, sums[5] + error, to_d, to_t, to_p);
    }
};

// Steps with the derivatives of ramps over their partitions.
template <Kind K>
struct Ramps : Partition<K> {
    // Of gradients: above each edge, all; inside the range from each partition on; those times the ramp r.
    static constexpr int kSums = 10;

    float ends[2], slope[3], offset[3], steepness[3];  // r of a partition is slope * x + offset; steepness: d / p

    __device__ __forceinline__ Ramps(const Group& group, const Grid& grid) : Partition<K>(group, grid) {
        const float low = this->extent.low, reciprocal = __fdividef(1.f, this->span);
        ends[0] = fmaf(this->span, this->p[0], low);
        ends[1] = fmaf(this->span, this->p[0] + this->p[1], low);
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const float inverse = __fdividef(1.f, width(i));
            slope[i] = reciprocal * inverse;
            offset[i] = 0.5f - (low * reciprocal + this->t[i]) * inverse;
            steepness[i] = this->d[i] * inverse;
        }
    }

    __device__ __forceinline__ float width(int i) const { return fmaxf(this->p[i], kEpsilon); }

    __device__ __forceinline__ float of_partition(const float (&each)[3], float x) const {
        return x > ends[1] ? each[2] : x > ends[0] ? each[1] : each[0];
    }

    __device__ __forceinline__ bool rises(float x) const { return x >= this->extent.low && x <= this->top; }

    __device__ __forceinline__ float direct(float x, float g) const {
        return rises(x) ? g * of_partition(steepness, x) : 0.f;
    }

    __device__ __forceinline__ void gather(float x, float g, float (&sums)[kSums]) const {
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (x > this->edges[i]) sums[i] += g;
        sums[3] += g;
        const float inside = rises(x) ? g : 0.f;
        const float r = inside * __saturatef(fmaf(x, of_partition(slope, x), of_partition(offset, x)));
        sums[4] += inside, sums[7] += r;
        if (x > ends[0]) sums[5] += inside, sums[8] += r;
        if (x > ends[1]) sums[6] += inside, sums[9] += r;
    }

    __device__ __forceinline__ GroupGradient backward(const Group& group, const float (&sums)[kSums]) const {
        const float from[4] = {sums[4], sums[5], sums[6], 0.f}, rising[4] = {sums[7], sums[8], sums[9], 0.f};
        const float to_d[3] = {sums[0], sums[1], sums[2]};
        float to_t[3], to_p[3], y = 0.f, rise = 0.f, x = 0.f;  // sums of y, of the slope, of the slope times x
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const float here = from[i] - from[i + 1], beyond = rising[i] - rising[i + 1] - 0.5f * here;
            y += this->d[i] * to_d[i];
            rise += steepness[i] * here;
            x += steepness[i] * fmaf(width(i), beyond, this->t[i] * here);
            to_t[i] = -steepness[i] * here;
            to_p[i] = -steepness[i] * beyond;
        }
        return Partition<K>::backward(group, sums[3] - y + x - rise, y - x, to_d, to_t, to_p);
    }
};

// ---- NormalFloat with a scale on either side of a centre, Eqs. 12 and 13; rounding has derivative one ----

template <Kind K>
struct Floats {
    // With e a gradient times the rounding error over the scale, or outside the range the value: e above the centre, all
    // e, and gradients outside the range.
    static constexpr int kSums = 3;
    static constexpr int kLevels = 8, kNegative = 3;

    Extent<K> extent;
    float centre, below, above, per_below, per_above, values[kLevels], levels[kLevels], edges[kLevels - 1];

    __device__ __forceinline__ Floats(const Group& group, const Grid& grid) : extent(group) {
        const NormalFloat& v = grid.values;
        const float all[kLevels] = {v.v0, v.v1, v.v2, v.v3, v.v4, v.v5, v.v6, v.v7};
        centre = K == kNf3Ldp ? __fadd_rn(extent.low, __fmul_rn(extent.span(), group.shares[2])) : 0.f;
        below = maximum(__fsub_rn(centre, extent.low), kTiny), above = maximum(__fsub_rn(extent.high, centre), kTiny);
        per_below = __fdividef(1.f, below), per_above = __fdividef(1.f, above);
#pragma unroll
        for (int i = 0; i < kLevels; ++i) {
            values[i] = all[i];
            levels[i] = __fadd_rn(centre, __fmul_rn(i < kNegative ? below : above, values[i]));
        }
#pragma unroll
        for (int i = 0; i < kLevels - 1; ++i) edges[i] = 0.5f * __fadd_rn(levels[i + 1], levels[i]);
    }

    __device__ __forceinline__ float of_code(const float (&each)[kLevels], float x) const {
        float found = each[0];
#pragma unroll
        for (int i = 0; i < kLevels - 1; ++i) found = x > edges[i] ? each[i + 1] : found;
        return found;
    }

    __device__ __forceinline__ float value(float x) const { return of_code(levels, x); }

    __device__ __forceinline__ bool inside(float from_centre) const {
        return fabsf(from_centre) <= (from_centre > 0.f ? above : below);
    }

    __device__ __forceinline__ float direct(float x, float g) const { return inside(x - centre) ? g : 0.f; }

    __device__ __forceinline__ void gather(float x, float g, float (&sums)[kSums]) const {
        const float from_centre = x - centre;
        const bool right = from_centre > 0.f, in = inside(from_centre);
        const float z = in ? from_centre * (right ? per_above : per_below) : 0.f;
        const float error = g * (of_code(values, x) - z);
        if (right) sums[0] += error;
        sums[1] += error;
        if (!in) sums[2] += g;
    }

    __device__ __forceinline__ GroupGradient backward(const Group& group, const float (&sums)[kSums]) const {
        const float to_high = sums[0], to_low = sums[0] - sums[1], to_centre = sums[2] - to_high - to_low;
        GroupGradient gradient;
        if constexpr (K == kNf3Ldp) {
            const float share = group.shares[2];
            Extent<K>::backward(group, to_low + to_centre * (1.f - share), to_high + to_centre * share, gradient);
            gradient.parameters[2] = to_centre * extent.span() * sigmoid_slope(share);
        } else {
            Extent<K>::backward(group, to_low, to_high, gradient);
        }
        return gradient;
    }
};

// ---- by kind ----

template <Kind K, StraightThrough S>
struct QuantizerOf {
    using Type = Floats<K>;
};
template <StraightThrough S>
struct QuantizerOf<kRange, S> {
    using Type = Uniform<kRange>;
};
template <StraightThrough S>
struct QuantizerOf<kLearnedRange, S> {
    using Type = Uniform<kLearnedRange>;
};
template <>
struct QuantizerOf<kLdp, kStep> {
    using Type = Steps<kLdp>;
};
template <>
struct QuantizerOf<kLdp, kRamp> {
    using Type = Ramps<kLdp>;
};
template <>
struct QuantizerOf<kN2uq, kStep> {
    using Type = Steps<kN2uq>;
};
template <>
struct QuantizerOf<kN2uq, kRamp> {
    using Type = Ramps<kN2uq>;
};
template <Kind K, StraightThrough S>
using Quantizer = typename QuantizerOf<K, S>::Type;

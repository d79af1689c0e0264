// One query's attention to tiles of a 4-bit KV cache, in a warp: scores, running softmax, weighted sum of values
// (QuaRot Sec. 4, stages 1d and 2c). The codes go to the tensor cores as they are: a nibble n in the low bits of an fp16
// is the denormal number n 2^-24, in bits 4..7 n 2^-20, and both are exact there. Scales and zero points are applied to
// sums, in float32:
//   score(token) = s (sum_d q c - z sum_d q),   out(d) = sum_token w c - sum_token w z,   w = s' exp(score - max).
// With static scales s and z are the head's, w is exp(score - max), and s' multiplies what comes out in the end. sm_80
// and newer (mma.m16n8k16).
#pragma once

#include "kv/ring.cuh"
#include "mma/warp.cuh"

namespace kv {

// Tokens that a warp takes at a time: 4 KiB of codes.
template <int D>
constexpr int kTile = 4096 / D;
template <int D, int Groups>
using Tile = Stage<D, Groups, kTile<D>>;

constexpr float kLowNibble = 1.f / (1 << 24), kHighNibble = 1.f / (1 << 20);
// Weights w stay below 2^kWeightBits in fp16, so that small ones are far from denormal.
constexpr float kWeightBits = 8.f;
// Score of a token that is not there: below every other, and finite, so that differences are never NaN.
constexpr float kNothing = -3e38f;

// The tokens of a tile that are there: neither in the prefix's places at the head of a sequence nor behind its end.
struct Present {
    int first;
    u32 count;

    __device__ __forceinline__ bool has(int token) const { return static_cast<u32>(token - first) < count; }
};

// The right operand of the scores, of 8 heads: for each 32 elements the four registers of two instructions, and the sum
// of each group's elements for heads 2 t and 2 t + 1. Elements that meet high nibbles are 2^-4 of the others.
template <int D, int Groups>
struct Queries {
    u32 operand[D / 32][4];
    float sum[kScales<Groups>][2];
};

// Queries of HeadTiles times 8 heads as `Queries` takes them: written head by head, read by every warp.
template <int D, int Groups, int HeadTiles>
struct alignas(16) QueryTile {  // lanes read 16 bytes at a time
    static constexpr int kSums = kScales<Groups>;
    __half operand[HeadTiles][D / 32][kWarp][8];
    float sum[HeadTiles * 8][kSums];

    __device__ __forceinline__ void store(const HeadVector<D>& q, int head, int lane) {
        const int r = lane % 8, reader = head % 8 * 4 + lane / 8;
#pragma unroll
        for (int group = 0; group < kSums; ++group) {
            float total = 0.f;
#pragma unroll
            for (int i = group * (D / 32 / kSums); i < (group + 1) * (D / 32 / kSums); ++i) {
                const __half x = __float2half_rn(4.f * q.x[i]);
                operand[head / 8][i][reader][r % 4 * 2 + r / 4] = r % 2 ? __hmul(x, __float2half_rn(0.0625f)) : x;
                total += __half2float(x);
            }
            total = warp_reduce<Sum>(total);
            if (lane == 0) sum[head][group] = 0.25f * total;
        }
    }

    __device__ __forceinline__ void load(Queries<D, Groups> (&q)[HeadTiles], int lane) const {
#pragma unroll
        for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
            for (int j = 0; j < D / 32; ++j) {
                const uint4 x = *reinterpret_cast<const uint4*>(operand[n][j][lane]);
                q[n].operand[j][0] = x.x, q[n].operand[j][1] = x.y, q[n].operand[j][2] = x.z, q[n].operand[j][3] = x.w;
            }
#pragma unroll
            for (int group = 0; group < kSums; ++group)
#pragma unroll
                for (int c = 0; c < 2; ++c) q[n].sum[group][c] = sum[n * 8 + lane % 4 * 2 + c][group];
        }
    }
};

// A word's eight nibbles as two pairs of fp16 registers: bytes 0 and 2, or (Odd) bytes 1 and 3.
template <bool Odd>
__device__ __forceinline__ u32 low_nibbles(u32 word) { return (Odd ? word >> 8 : word) & 0x000f000fu; }
template <bool Odd>
__device__ __forceinline__ u32 high_nibbles(u32 word) { return (Odd ? word >> 8 : word) & 0x00f000f0u; }

// Count consecutive words of shared memory.
template <int Count>
__device__ __forceinline__ void load_words(u32 (&word)[Count], const unsigned char* from) {
    if constexpr (Count == 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    } else {
        static_assert(Count == 2, "a lane reads two or four words");
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        word[0] = x.x, word[1] = x.y;
    }
}

// Scale and zero point of a token's group.
template <int Groups>
struct TokenParams {
    const __half2* params;
    __device__ __forceinline__ float2 of(int token, int group) const {
        return __half22float2(params[token * Groups + group]);
    }
};
template <>
struct TokenParams<kStatic> {
    float scale;
    __device__ __forceinline__ float2 of(int, int) const { return make_float2(scale, kStaticZero); }
};

// Scores in units of log2, of 16 tokens and HeadTiles times 8 heads: rows g, g + 8, columns 2 t, 2 t + 1, as the product
// leaves them.
template <int D, int Groups, int HeadTiles>
__device__ __forceinline__ void score_block(float (&score)[HeadTiles][4], const unsigned char* keys,
                                            const TokenParams<Groups>& params, const Queries<D, Groups> (&q)[HeadTiles],
                                            int lane) {
    constexpr int kWords = D / 32, kPerGroup = kWords / kScales<Groups>;
    const int g = lane / 4, t = lane % 4;
    u32 upper[kWords], lower[kWords];
    load_words(upper, keys + g * (D / 2) + t * (D / 8));
    load_words(lower, keys + (g + 8) * (D / 2) + t * (D / 8));
#pragma unroll
    for (int group = 0; group < kScales<Groups>; ++group) {
        float sum[HeadTiles][4] = {};
#pragma unroll
        for (int j = group * kPerGroup; j < (group + 1) * kPerGroup; ++j) {
#pragma unroll
            for (int n = 0; n < HeadTiles; ++n) {
                const u32(&b)[4] = q[n].operand[j];
                ptx::mma_m16n8k16<__half>(sum[n],
                                          {low_nibbles<false>(upper[j]), low_nibbles<false>(lower[j]),
                                           high_nibbles<false>(upper[j]), high_nibbles<false>(lower[j])},
                                          b[0], b[1]);
                ptx::mma_m16n8k16<__half>(sum[n],
                                          {low_nibbles<true>(upper[j]), low_nibbles<true>(lower[j]),
                                           high_nibbles<true>(upper[j]), high_nibbles<true>(lower[j])},
                                          b[2], b[3]);
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float2 p = params.of(g + 8 * row, group);
            const float scale = p.x * 4194304.f;  // codes 2^-24, queries 2^2
            const float offset = -p.x * p.y;
#pragma unroll
            for (int n = 0; n < HeadTiles; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float shift = offset * q[n].sum[group][c];
                    float& s = score[n][2 * row + c];
                    s = (group == 0 ? shift : s + shift) + scale * sum[n][2 * row + c];
                }
        }
    }
}

// floor(log2 x) of a positive normal number, as a float without a conversion instruction.
__device__ __forceinline__ float exponent_of(float x) {
    return __uint_as_float(__float_as_uint(x) >> 23 | 0x4b000000u) - 8388735.f;
}

// Running softmax-weighted sum of values for HeadTiles times 8 heads; lane 4 g + t holds heads 2 t, 2 t + 1 of each 8.
//
// The reference exponent `top` is the maximum of score + log2(scale of the value), so that weights w = s' exp(..) are
// near one whatever the values' scale, and lose nothing in fp16; with static scales, of the score. Zero points take the
// same rounded weights.
template <int D, int Groups, int HeadTiles>
struct Accumulator {
    static constexpr int kBlocks = kTile<D> / 16, kTiles = D / 16, kSums = kScales<Groups>, kPerGroup = kTiles / kSums;
    static constexpr int kWidth = kPerGroup % 4 ? 2 : 4;  // words of a load
    float out[HeadTiles][kTiles][4];  // elements 16 m + g in units of 2^-24, 16 m + g + 8 in units of 2^-20
    float top[HeadTiles][2], total[HeadTiles][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c) out[n][m][c] = 0.f;
#pragma unroll
            for (int c = 0; c < 2; ++c) top[n][c] = kNothing, total[n][c] = 0.f;
        }
    }

    // Take the tokens of a tile that are there; the scores of all are given.
    __device__ __forceinline__ void add(float (&score)[kBlocks][HeadTiles][4], const Tile<D, Groups>& stage,
                                        const Present& present, int lane) {
        const int g = lane / 4;
        float scale[kBlocks][2][kSums], exponent[kBlocks][2];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int token = 16 * b + 8 * row + g;
                if constexpr (Groups != kStatic) {
                    float largest = kLowNibble;  // the smallest positive fp16
#pragma unroll
                    for (int group = 0; group < Groups; ++group) {
                        const float s = __low2float(stage.v_params[token * Groups + group]);
                        scale[b][row][group] = present.has(token) ? s : 0.f;
                        largest = fmaxf(largest, scale[b][row][group]);
                    }
                    exponent[b][row] = exponent_of(largest);
                }
                if (!present.has(token))
#pragma unroll
                    for (int n = 0; n < HeadTiles; ++n) score[b][n][2 * row] = score[b][n][2 * row + 1] = kNothing;
            }
        float rescale[HeadTiles][2];
        weigh(score, exponent, rescale);
#pragma unroll
        for (int group = 0; group < kSums; ++group) add_group(group, score, scale, rescale, stage, present, lane);
    }

    // Scores become exp(score - top); `rescale` is what that does to earlier sums.
    __device__ __forceinline__ void weigh(float (&score)[kBlocks][HeadTiles][4], const float (&exponent)[kBlocks][2],
                                          float (&rescale)[HeadTiles][2]) {
#pragma unroll
        for (int n = 0; n < HeadTiles; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float now = top[n][c];
#pragma unroll
                for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        const float s = score[b][n][2 * row + c];
                        now = fmaxf(now, Groups == kStatic ? s : s + exponent[b][row]);
                    }
#pragma unroll
                for (int step = 4; step < kWarp; step *= 2) now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, step));
                rescale[n][c] = ptx::exp2_approx(top[n][c] - now);
                top[n][c] = now;
                total[n][c] *= rescale[n][c];
                const float base = now - kWeightBits;
#pragma unroll
                for (int b = 0; b < kBlocks; ++b)
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        float& s = score[b][n][2 * row + c];
                        s = ptx::exp2_approx(s - base);
                        total[n][c] += s;
                    }
            }
    }

    // The elements of one quantization group: their weights, the zero points' share, and the codes' products.
    __device__ __forceinline__ void add_group(int group, const float (&p)[kBlocks][HeadTiles][4],
                                              const float (&scale)[kBlocks][2][kSums],
                                              const float (&rescale)[HeadTiles][2], const Tile<D, Groups>& stage,
                                              const Present& present, int lane) {
        u32 weight[kBlocks][HeadTiles][2];
        float zeros[HeadTiles][4] = {};
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const u32 z0 = zero_pair(stage, group, 16 * b + lane % 4 * 2, present);
            const u32 z1 = zero_pair(stage, group, 16 * b + 8 + lane % 4 * 2, present);
#pragma unroll
            for (int n = 0; n < HeadTiles; ++n) {
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float s = Groups == kStatic ? 1.f : scale[b][row][group];
                    const __half2 w = __floats2half2_rn(p[b][n][2 * row] * s, p[b][n][2 * row + 1] * s);
                    weight[b][n][row] = ptx::movmatrix_trans(*reinterpret_cast<const u32*>(&w));
                }
                ptx::mma_m16n8k16<__half>(zeros[n], {z0, z0, z1, z1}, weight[b][n][0], weight[b][n][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < HeadTiles; ++n)
#pragma unroll
            for (int m = group * kPerGroup; m < (group + 1) * kPerGroup; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    out[n][m][c] = out[n][m][c] * rescale[n][c % 2] - zeros[n][c] * (c < 2 ? kLowNibble : kHighNibble);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int m = group * kPerGroup; m < (group + 1) * kPerGroup; m += kWidth) {
                u32 word[kWidth];
                load_words(word, stage.v + b * (8 * D) + m / 4 * 512 + lane * 16 + m % 4 * 4);
#pragma unroll
                for (int i = 0; i < kWidth; ++i)
#pragma unroll
                    for (int n = 0; n < HeadTiles; ++n)
                        ptx::mma_m16n8k16<__half>(out[n][m + i],
                                                  {low_nibbles<false>(word[i]), high_nibbles<false>(word[i]),
                                                   low_nibbles<true>(word[i]), high_nibbles<true>(word[i])},
                                                  weight[b][n][0], weight[b][n][1]);
            }
    }

    // Zero points of two consecutive tokens; those that are not there may be anything, and count as zero, where their
    // weight does not.
    __device__ static __forceinline__ u32 zero_pair(const Tile<D, Groups>& stage, int group, int token,
                                                    const Present& present) {
        if constexpr (Groups == kStatic) {
            const __half2 pair = __float2half2_rn(kStaticZero);
            return *reinterpret_cast<const u32*>(&pair);
        } else {
            const __half2 pair = __halves2half2(__high2half(stage.v_params[token * Groups + group]),
                                                __high2half(stage.v_params[(token + 1) * Groups + group]));
            const u32 bits = *reinterpret_cast<const u32*>(&pair);
            return (present.has(token) ? bits & 0xffffu : 0u) | (present.has(token + 1) ? bits & 0xffff0000u : 0u);
        }
    }

    __device__ __forceinline__ void reduce_totals() {
#pragma unroll
        for (int n = 0; n < HeadTiles; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int step = 4; step < kWarp; step *= 2)
                    total[n][c] += __shfl_xor_sync(kAllLanes, total[n][c], step);
    }
};

}  // namespace kv

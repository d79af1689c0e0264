// Decode attention on a 4-bit KV cache: one query per sequence and head, split over the sequence (QuaRot Sec. 4, stages
// 1d and 2c). The codes go to the tensor cores as they are: a nibble n in the low bits of an fp16 is the denormal number
// n 2^-24, in bits 4..7 n 2^-20, and both are exact there. Scales and zero points are applied to sums, in float32:
//   score(token) = s (sum_d q c - z sum_d q),   out(d) = sum_token w c - sum_token w z,   w = s' exp(score - max).
// Keys or values are never dequantized. sm_80 and newer (mma.m16n8k16, cp.async).

#include "kv.cuh"
#include "ptx.cuh"

using namespace kv;
using ptx::u32;

constexpr int WARPS = 4;
constexpr int TILE = 32;  // tokens that a warp takes at a time, two operands of 16
constexpr int BLOCKS = TILE / 16;
constexpr float LOW_NIBBLE = 1.f / (1 << 24), HIGH_NIBBLE = 1.f / (1 << 20);
// Weights w stay below 2^WEIGHT_BITS in fp16, so that small ones are far from denormal.
constexpr float WEIGHT_BITS = 8.f;
constexpr int MAX_SPLITS = 64;
// Score of a token that is not there: below every other, and finite, so that differences are never NaN.
constexpr float NOTHING = -3e38f;

// One stage of a warp's ring in shared memory.
template <int D, int GROUPS>
struct Stage {
    static constexpr int CODES = TILE * D / 2, PARAMS = TILE * GROUPS * 4;
    unsigned char k[CODES], v[CODES];
    __half2 k_params[TILE * GROUPS], v_params[TILE * GROUPS];
};

// What the kernel reads, as it lies in global memory.
template <int D, int GROUPS>
struct Pools {
    const unsigned char *k, *v;
    const __half2 *k_params, *v_params;

    // Start copying `TILE` tokens from token number `token` of the pool (all pages of all heads in a row).
    __device__ __forceinline__ void fetch(Stage<D, GROUPS>& stage, long long token, int lane) const {
        using S = Stage<D, GROUPS>;
        copy<S::CODES>(stage.k, k + token * (D / 2), lane);
        copy<S::CODES>(stage.v, v + token * (D / 2), lane);
        copy<S::PARAMS>(stage.k_params, k_params + token * GROUPS, lane);
        copy<S::PARAMS>(stage.v_params, v_params + token * GROUPS, lane);
    }

    template <int BYTES>
    __device__ static __forceinline__ void copy(void* shared, const void* global, int lane) {
#pragma unroll
        for (int at = 0; at < BYTES; at += WARP * 16)
            if (at + lane * 16 < BYTES)
                ptx::cp_async_16(ptx::shared_address(shared) + at + lane * 16,
                                 static_cast<const char*>(global) + at + lane * 16);
    }
};

// The right operand of the scores, of 8 heads: for each 32 elements the four registers of two instructions, and the sum
// of each group's elements for heads 2 t and 2 t + 1. Elements that meet high nibbles are 2^-4 of the others.
template <int D, int GROUPS>
struct Queries {
    u32 operand[D / 32][4];
    float sum[GROUPS][2];
};

// Queries of 8 NT heads as `Queries` takes them: written head by head, read by every warp.
template <int D, int GROUPS, int NT>
struct QueryTile {
    __half operand[NT][D / 32][WARP][8];
    float sum[NT * 8][GROUPS];

    __device__ __forceinline__ void store(const HeadVector<D>& q, int head, int lane) {
        const int r = lane % 8, reader = head % 8 * 4 + lane / 8;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float total = 0.f;
#pragma unroll
            for (int i = group * (D / 32 / GROUPS); i < (group + 1) * (D / 32 / GROUPS); ++i) {
                const __half x = __float2half_rn(4.f * q.x[i]);
                operand[head / 8][i][reader][r % 4 * 2 + r / 4] = r % 2 ? __hmul(x, __float2half_rn(0.0625f)) : x;
                total += __half2float(x);
            }
            total = warp_sum(total);
            if (lane == 0) sum[head][group] = 0.25f * total;
        }
    }

    __device__ __forceinline__ void load(Queries<D, GROUPS> (&q)[NT], int lane) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int j = 0; j < D / 32; ++j) {
                const uint4 x = *reinterpret_cast<const uint4*>(operand[n][j][lane]);
                q[n].operand[j][0] = x.x, q[n].operand[j][1] = x.y, q[n].operand[j][2] = x.z, q[n].operand[j][3] = x.w;
            }
#pragma unroll
            for (int group = 0; group < GROUPS; ++group)
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

// COUNT consecutive words of shared memory.
template <int COUNT>
__device__ __forceinline__ void load_words(u32 (&word)[COUNT], const unsigned char* from) {
    if constexpr (COUNT == 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    } else {
        static_assert(COUNT == 2, "a lane reads two or four words");
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        word[0] = x.x, word[1] = x.y;
    }
}

// Scores in units of log2, of 16 tokens and 8 NT heads: rows g, g + 8 and columns 2 t, 2 t + 1, as the product leaves them.
template <int D, int GROUPS, int NT>
__device__ __forceinline__ void score_block(float (&score)[NT][4], const unsigned char* keys, const __half2* params,
                                            const Queries<D, GROUPS> (&q)[NT], int lane) {
    constexpr int WORDS = D / 32, PER_GROUP = WORDS / GROUPS;
    const int g = lane / 4, t = lane % 4;
    u32 upper[WORDS], lower[WORDS];
    load_words(upper, keys + g * (D / 2) + t * (D / 8));
    load_words(lower, keys + (g + 8) * (D / 2) + t * (D / 8));
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        float sum[NT][4] = {};
#pragma unroll
        for (int j = group * PER_GROUP; j < (group + 1) * PER_GROUP; ++j) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const u32(&b)[4] = q[n].operand[j];
                ptx::mma_m16n8k16_f16(sum[n], low_nibbles<false>(upper[j]), low_nibbles<false>(lower[j]),
                                      high_nibbles<false>(upper[j]), high_nibbles<false>(lower[j]), b[0], b[1]);
                ptx::mma_m16n8k16_f16(sum[n], low_nibbles<true>(upper[j]), low_nibbles<true>(lower[j]),
                                      high_nibbles<true>(upper[j]), high_nibbles<true>(lower[j]), b[2], b[3]);
            }
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float2 p = __half22float2(params[(g + 8 * row) * GROUPS + group]);
            const float scale = p.x * 4194304.f;  // codes 2^-24, queries 2^2
            const float offset = -p.x * p.y;
#pragma unroll
            for (int n = 0; n < NT; ++n)
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

// Running softmax-weighted sum of values for 8 NT heads; lane 4 g + t holds heads 2 t, 2 t + 1 of each 8.
//
// The reference exponent `top` is the maximum of score + log2(scale of the value), so that weights w = s' exp(..) are
// near one whatever the values' scale, and lose nothing in fp16. Zero points are taken off with the same rounded weights.
template <int D, int GROUPS, int NT>
struct Accumulator {
    static constexpr int TILES = D / 16, PER_GROUP = TILES / GROUPS, WIDTH = PER_GROUP % 4 ? 2 : 4;
    float out[NT][TILES][4];  // elements 16 m + g in units of 2^-24, 16 m + g + 8 in units of 2^-20
    float top[NT][2], total[NT][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int m = 0; m < TILES; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c) out[n][m][c] = 0.f;
#pragma unroll
            for (int c = 0; c < 2; ++c) top[n][c] = NOTHING, total[n][c] = 0.f;
        }
    }

    // Take `valid` tokens (TILE but at the end of a sequence), whose scores are given.
    __device__ __forceinline__ void add(float (&score)[BLOCKS][NT][4], const Stage<D, GROUPS>& stage, int valid,
                                        int lane) {
        const int g = lane / 4;
        float scale[BLOCKS][2][GROUPS], exponent[BLOCKS][2];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int token = 16 * b + 8 * row + g;
                float largest = LOW_NIBBLE;  // the smallest positive fp16
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    const float s = __low2float(stage.v_params[token * GROUPS + group]);
                    scale[b][row][group] = token < valid ? s : 0.f;
                    largest = fmaxf(largest, scale[b][row][group]);
                }
                exponent[b][row] = exponent_of(largest);
                if (token >= valid)
#pragma unroll
                    for (int n = 0; n < NT; ++n) score[b][n][2 * row] = score[b][n][2 * row + 1] = NOTHING;
            }
        float rescale[NT][2];
        weigh(score, exponent, rescale);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) add_group(group, score, scale, rescale, stage, valid, lane);
    }

    // Scores become exp(score - top); `rescale` is what that does to earlier sums.
    __device__ __forceinline__ void weigh(float (&score)[BLOCKS][NT][4], const float (&exponent)[BLOCKS][2],
                                          float (&rescale)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float now = top[n][c];
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                    for (int row = 0; row < 2; ++row) now = fmaxf(now, score[b][n][2 * row + c] + exponent[b][row]);
#pragma unroll
                for (int step = 4; step < WARP; step *= 2) now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, step));
                rescale[n][c] = ptx::exp2_approx(top[n][c] - now);
                top[n][c] = now;
                total[n][c] *= rescale[n][c];
                const float base = now - WEIGHT_BITS;
#pragma unroll
                for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        float& s = score[b][n][2 * row + c];
                        s = ptx::exp2_approx(s - base);
                        total[n][c] += s;
                    }
            }
    }

    // The elements of one quantization group: their weights, the zero points' share, and the codes' products.
    __device__ __forceinline__ void add_group(int group, const float (&p)[BLOCKS][NT][4],
                                              const float (&scale)[BLOCKS][2][GROUPS], const float (&rescale)[NT][2],
                                              const Stage<D, GROUPS>& stage, int valid, int lane) {
        u32 weight[BLOCKS][NT][2];
        float zeros[NT][4] = {};
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            const u32 z0 = zero_pair(stage, group, 16 * b + lane % 4 * 2, valid);
            const u32 z1 = zero_pair(stage, group, 16 * b + 8 + lane % 4 * 2, valid);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float s = scale[b][row][group];
                    const __half2 w = __floats2half2_rn(p[b][n][2 * row] * s, p[b][n][2 * row + 1] * s);
                    weight[b][n][row] = ptx::transpose_8x8(*reinterpret_cast<const u32*>(&w));
                }
                ptx::mma_m16n8k16_f16(zeros[n], z0, z0, z1, z1, weight[b][n][0], weight[b][n][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int m = group * PER_GROUP; m < (group + 1) * PER_GROUP; ++m)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    out[n][m][c] = out[n][m][c] * rescale[n][c % 2] - zeros[n][c] * (c < 2 ? LOW_NIBBLE : HIGH_NIBBLE);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
            for (int m = group * PER_GROUP; m < (group + 1) * PER_GROUP; m += WIDTH) {
                u32 word[WIDTH];
                load_words(word, stage.v + b * (8 * D) + m / 4 * 512 + lane * 16 + m % 4 * 4);
#pragma unroll
                for (int i = 0; i < WIDTH; ++i)
#pragma unroll
                    for (int n = 0; n < NT; ++n)
                        ptx::mma_m16n8k16_f16(out[n][m + i], low_nibbles<false>(word[i]), high_nibbles<false>(word[i]),
                                              low_nibbles<true>(word[i]), high_nibbles<true>(word[i]), weight[b][n][0],
                                              weight[b][n][1]);
            }
    }

    // Zero points of two consecutive tokens; those beyond the sequence may be anything, and count as zero.
    __device__ static __forceinline__ u32 zero_pair(const Stage<D, GROUPS>& stage, int group, int token, int valid) {
        const __half2 pair = __halves2half2(__high2half(stage.v_params[token * GROUPS + group]),
                                            __high2half(stage.v_params[(token + 1) * GROUPS + group]));
        u32 bits = *reinterpret_cast<const u32*>(&pair);
        if (token + 1 >= valid) bits = token < valid ? bits & 0xffffu : 0u;
        return bits;
    }

    __device__ __forceinline__ void reduce_totals() {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int step = 4; step < WARP; step *= 2)
                    total[n][c] += __shfl_xor_sync(ALL_LANES, total[n][c], step);
    }
};

// The warps' sums of one block, on their way into one.
template <int D, int NT>
struct Merge {
    static constexpr int ROW = D + 4;  // heads 2 t of four lanes in different banks
    float out[WARPS][NT * 8][ROW];
    float top[WARPS][NT * 8], total[WARPS][NT * 8];

    template <int GROUPS>
    __device__ __forceinline__ void store(const Accumulator<D, GROUPS, NT>& sums, int warp, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int head = n * 8 + 2 * t + c;
#pragma unroll
                for (int m = 0; m < D / 16; ++m) {
                    out[warp][head][16 * m + g] = sums.out[n][m][c] * (1.f / LOW_NIBBLE);
                    out[warp][head][16 * m + g + 8] = sums.out[n][m][2 + c] * (1.f / HIGH_NIBBLE);
                }
                if (g == 0) top[warp][head] = sums.top[n][c], total[warp][head] = sums.total[n][c];
            }
    }
};

// Where the splits of a (sequence, kv head) leave their sums: for each split and head a row of D sums, their reference
// exponent and the sum of weights, and padding to 16 bytes.
template <int D>
struct Partial {
    float* base;
    int group;
    __device__ __forceinline__ float* row(int split, int head) const { return base + (split * group + head) * (D + 4); }
};

// The last block of a (sequence, kv head) to finish adds all splits' sums, in their order, and writes the output.
template <typename T, int D>
__device__ void combine(const Partial<D>& partial, int splits, T* out, float (*factor)[MAX_SPLITS]) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int head = warp; head < partial.group; head += WARPS) {
        float2 sums[MAX_SPLITS / WARP];  // reference exponent, sum of weights
        float top = NOTHING, total = 0.f;
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / WARP; ++i) {
            const int split = lane + WARP * i;
            const float* tail = partial.row(split, head) + D;
            sums[i] = split < splits ? __ldcg(reinterpret_cast<const float2*>(tail)) : make_float2(NOTHING, 0.f);
            top = fmaxf(top, sums[i].x);
        }
        top = warp_max(top);
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / WARP; ++i) {
            sums[i].x = ptx::exp2_approx(sums[i].x - top);
            total += sums[i].x * sums[i].y;
        }
        total = warp_sum(total);
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / WARP; ++i)
            factor[head][lane + WARP * i] = total > 0.f ? sums[i].x / total : 0.f;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < partial.group * (D / 4); at += WARPS * WARP) {
        const int head = at / (D / 4), d = at % (D / 4) * 4;
        float sum[4] = {};
#pragma unroll 8
        for (int s = 0; s < splits; ++s) {
            const float4 x = __ldcg(reinterpret_cast<const float4*>(partial.row(s, head) + d));
            const float f = factor[head][s];
            sum[0] += f * x.x, sum[1] += f * x.y, sum[2] += f * x.z, sum[3] += f * x.w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) out[head * D + d + i] = from_float<T>(sum[i]);
    }
}

// Grid (splits, kv_heads, batch). The tokens present are shared out among the splits whatever their number, so a captured
// launch serves every length. Strides are in elements; `scale` is log2(e) / sqrt(D).
template <typename T, int D, int GROUPS, int NT, int STAGES>
__global__ void __launch_bounds__(WARPS * WARP, NT == 1 ? 4 : 2)
    kv_attention(const T* q, long long q_batch, const T* cos, const T* sin, int cos_batch, const unsigned char* k_codes,
                 const unsigned char* v_codes, const __half2* k_params, const __half2* v_params, const int* lengths,
                 int new_tokens, const int* table, int pages, int per_sequence, int page_size, int group, int rotate,
                 float scale, float* workspace, int* counters, T* out) {
    constexpr int HEADS_PER_WARP = NT * 8 / WARPS;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ QueryTile<D, GROUPS, NT> queries;
    __shared__ int arrived;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int split = blockIdx.x, kv_head = blockIdx.y, sequence = blockIdx.z, kv_heads = gridDim.y;
    // Loads that depend on nothing first: they return while the length does.
    HeadVector<D> x[HEADS_PER_WARP] = {};
#pragma unroll
    for (int i = 0; i < HEADS_PER_WARP; ++i)
        if (warp + WARPS * i < group)
            x[i].load(q + sequence * q_batch + (kv_head * group + warp + WARPS * i) * D, lane);
    const Pages book{table, pages, per_sequence, page_size};
    const int length = min(max(lengths[sequence] + new_tokens, 0), book.capacity());
    const int tiles = (length + TILE - 1) / TILE;
    const int per_split = max(1, (tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
    const int splits = max(1, (tiles + per_split - 1) / per_split);
    if (split >= splits) return;

    auto& ring = reinterpret_cast<Stage<D, GROUPS>(*)[STAGES]>(shared)[warp];
    const Pools<D, GROUPS> pools{k_codes, v_codes, k_params, v_params};
    const int last = min((split + 1) * per_split, tiles);
    int next = split * per_split + warp, page = next * TILE / page_size, slot = next * TILE % page_size, stage = 0;
    auto fetch_next = [&] {
        if (next < last) {
            const long long plane = static_cast<long long>(book.number(sequence, page)) * kv_heads + kv_head;
            pools.fetch(ring[stage], plane * page_size + slot, lane);
            slot += WARPS * TILE;
            while (slot >= page_size) slot -= page_size, ++page;
        }
        ptx::cp_async_commit();
        next += WARPS;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch_next();

    const int angles = sequence * cos_batch * D;
#pragma unroll
    for (int i = 0; i < HEADS_PER_WARP; ++i) {
        if (warp + WARPS * i < group) {
            if (cos != nullptr) x[i].template rope<T>(cos + angles, sin + angles, lane);
            if (rotate) x[i].hadamard(lane);
#pragma unroll
            for (int j = 0; j < D / WARP; ++j) x[i].x[j] *= scale;
        }
        queries.store(x[i], warp + WARPS * i, lane);
    }
    __syncthreads();
    Queries<D, GROUPS> operand[NT];
    queries.load(operand, lane);

    Accumulator<D, GROUPS, NT> sums;
    sums.clear();
    int current = 0;
    for (int tile = split * per_split + warp; tile < last; tile += WARPS) {
        ptx::cp_async_wait<STAGES - 2>();
        __syncwarp();
        fetch_next();
        const Stage<D, GROUPS>& here = ring[current];
        float score[BLOCKS][NT][4];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b)
            score_block<D, GROUPS, NT>(score[b], here.k + b * (8 * D), here.k_params + b * 16 * GROUPS, operand, lane);
        sums.add(score, here, length - tile * TILE, lane);
        current = current + 1 == STAGES ? 0 : current + 1;
    }
    sums.reduce_totals();

    auto& merge = *reinterpret_cast<Merge<D, NT>*>(shared);
    __syncthreads();  // all warps have read their rings
    merge.store(sums, warp, lane);
    __syncthreads();
    const long long pair = static_cast<long long>(sequence) * kv_heads + kv_head;
    const Partial<D> partial{workspace + pair * gridDim.x * group * (D + 4), group};
    T* target = out + pair * group * D;
    for (int at = threadIdx.x; at < group * D; at += WARPS * WARP) {
        const int head = at / D, d = at % D;
        float top = NOTHING, total = 0.f, sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, merge.top[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = ptx::exp2_approx(merge.top[w][head] - top);
            total += weight * merge.total[w][head];
            sum += weight * merge.out[w][head][d];
        }
        if (splits == 1) {
            target[at] = from_float<T>(total > 0.f ? sum / total : 0.f);
        } else {
            float* row = partial.row(split, head);
            row[d] = sum;
            if (d == 0) row[D] = top, row[D + 1] = total;
        }
    }
    if (splits == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrived = atomicAdd(&counters[pair], 1);
    __syncthreads();
    if (arrived != splits - 1) return;
    __threadfence();
    combine<T, D>(partial, splits, target, reinterpret_cast<float(*)[MAX_SPLITS]>(shared));
    if (threadIdx.x == 0) counters[pair] = 0;
}

// Decode attention on a 4-bit KV cache: one query per sequence and head, split over the sequence (QuaRot Sec. 4,
// stages 1d and 2c). Warps take tiles of tokens in turn, each with a running softmax of its own; their sums are merged
// in shared memory, and the splits' sums by the last block to finish. Keys and values are never dequantized. A prefix
// of floating-point keys and values before all sequences (PrefixQuant Sec. 5.1) is one more part of that merge. sm_80
// and newer.

#include "kv/softmax.cuh"

using namespace kv;

constexpr int kWarps = 8;
constexpr int kMaxSplits = 64;

// Sums of one head over some tokens: those of values, element by element as `HeadVector` has them, and of weights.
template <int D>
struct HeadSums {
    HeadVector<D> out;
    float top, total;
};

// The warps' sums for eight heads, and those over the prefix, on their way into one.
template <int D>
struct Merge {
    static constexpr int kRow = D + 4;  // heads 2 t of four lanes in different banks
    float out[kWarps + 1][8][kRow];
    float top[kWarps + 1][8], total[kWarps + 1][8];

    // The N-th eight heads of a warp, values times `unit`.
    template <int N, int Groups, int HeadTiles>
    __device__ __forceinline__ void store(const Accumulator<D, Groups, HeadTiles>& sums, float unit, int warp,
                                          int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int head = 2 * t + c;
#pragma unroll
            for (int m = 0; m < D / 16; ++m) {
                out[warp][head][16 * m + g] = sums.out[N][m][c] * (unit / kLowNibble);
                out[warp][head][16 * m + g + 8] = sums.out[N][m][2 + c] * (unit / kHighNibble);
            }
            if (g == 0) top[warp][head] = sums.top[N][c], total[warp][head] = sums.total[N][c];
        }
    }

    // A head's sums over the prefix.
    __device__ __forceinline__ void store_prefix(const HeadSums<D>& sums, int head, int lane) {
#pragma unroll
        for (int i = 0; i < D / kWarp; ++i) out[kWarps][head][lane + kWarp * i] = sums.out.x[i];
        if (lane == 0) top[kWarps][head] = sums.top, total[kWarps][head] = sums.total;
    }

    struct Sum {
        float value, top, total;
    };

    __device__ __forceinline__ Sum sum(int head, int d, bool prefixed) const {
        Sum all{0.f, prefixed ? top[kWarps][head] : kNothing, 0.f};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) all.top = fmaxf(all.top, top[w][head]);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) add(all, w, head, d);
        if (prefixed) add(all, kWarps, head, d);
        return all;
    }

private:
    __device__ __forceinline__ void add(Sum& all, int w, int head, int d) const {
        const float weight = ptx::exp2_approx(top[w][head] - all.top);
        all.total += weight * total[w][head];
        all.value += weight * out[w][head][d];
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

// Merge the warps' sums, their values times `unit`, and the prefix's where the block has it, from eight heads on at a
// time: into the output where the block had the whole sequence, else into its rows of `partial`.
template <int N, class T, int D, int Groups, int HeadTiles>
__device__ __forceinline__ void merge_warps(const Accumulator<D, Groups, HeadTiles>& sums, float unit,
                                            const HeadSums<D> (&prefix)[HeadTiles], bool prefixed, Merge<D>& merge,
                                            const Partial<D>& partial, int split, int splits, T* out) {
    static_assert(kWarps == 8, "a warp has one of eight heads");
    __syncthreads();  // all warps have done with what lay in this memory
    merge.template store<N>(sums, unit, threadIdx.x / kWarp, threadIdx.x % kWarp);
    if (prefixed) merge.store_prefix(prefix[N], threadIdx.x / kWarp, threadIdx.x % kWarp);
    __syncthreads();
    for (int at = threadIdx.x; at < min(partial.group - 8 * N, 8) * D; at += kWarps * kWarp) {
        const int head = at / D, d = at % D;
        const auto all = merge.sum(head, d, prefixed);
        if (splits == 1) {
            out[8 * N * D + at] = static_cast<T>(all.total > 0.f ? all.value / all.total : 0.f);
        } else {
            float* row = partial.row(split, 8 * N + head);
            row[d] = all.value;
            if (d == 0) row[D] = all.top, row[D + 1] = all.total;
        }
    }
    if constexpr (N + 1 < HeadTiles)
        merge_warps<N + 1>(sums, unit, prefix, prefixed, merge, partial, split, splits, out);
}

// Whether this block is the last of `splits` to come here; it then sees what the others wrote before.
__device__ __forceinline__ bool is_last(int* counter, int splits) {
    __shared__ int arrived;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        arrived = atomicAdd(counter, 1);
        if (arrived == splits - 1) *counter = 0;  // for the next launch
    }
    __syncthreads();
    __threadfence();
    return arrived == splits - 1;
}

// The last block of a (sequence, kv head) adds all splits' sums, in their order, and writes the output.
template <class T, int D>
__device__ void combine(const Partial<D>& partial, int splits, T* out, float (*factor)[kMaxSplits]) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (int head = warp; head < partial.group; head += kWarps) {
        float2 sums[kMaxSplits / kWarp];  // reference exponent, sum of weights
        float top = kNothing, total = 0.f;
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            const int split = lane + kWarp * i;
            const float* tail = partial.row(split, head) + D;
            sums[i] = split < splits ? __ldcg(reinterpret_cast<const float2*>(tail)) : make_float2(kNothing, 0.f);
            top = fmaxf(top, sums[i].x);
        }
        top = warp_reduce<Maximum>(top);
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i) {
            sums[i].x = ptx::exp2_approx(sums[i].x - top);
            total += sums[i].x * sums[i].y;
        }
        total = warp_reduce<Sum>(total);
#pragma unroll
        for (int i = 0; i < kMaxSplits / kWarp; ++i)
            factor[head][lane + kWarp * i] = total > 0.f ? sums[i].x / total : 0.f;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < partial.group * (D / 4); at += kWarps * kWarp) {
        const int head = at / (D / 4), d = at % (D / 4) * 4;
        float sum[4] = {};
#pragma unroll 8
        for (int s = 0; s < splits; ++s) {
            const float4 x = __ldcg(reinterpret_cast<const float4*>(partial.row(s, head) + d));
            const float f = factor[head][s];
            sum[0] += f * x.x, sum[1] += f * x.y, sum[2] += f * x.z, sum[3] += f * x.w;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) out[head * D + d + i] = static_cast<T>(sum[i]);
    }
}

// The tiles that one of `most` blocks takes of a sequence's, and how many blocks have any.
struct Share {
    int first, last, splits;

    __device__ __forceinline__ Share(int tiles, int split, int most) {
        const int each = max(1, (tiles + most - 1) / most);
        splits = max(1, (tiles + each - 1) / each);
        first = split * each;
        last = min(first + each, tiles);
    }
};

// One query's attention to floating-point keys and values [tokens, D], in a warp; q as scores in units of log2 need it.
template <class T, int D>
__device__ __forceinline__ HeadSums<D> attend_to_floats(const HeadVector<D>& q, const T* keys, const T* values,
                                                        int tokens, int lane) {
    constexpr int kAtOnce = 4;  // whose loads are under way together
    HeadSums<D> sums{{}, kNothing, 0.f};
    for (int first = 0; first < tokens; first += kAtOnce) {
        HeadVector<D> key[kAtOnce], value[kAtOnce];
        float score[kAtOnce], now = sums.top;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int token = min(first + j, tokens - 1);
            key[j].load(keys + token * D, lane);
            value[j].load(values + token * D, lane);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            float product = 0.f;
#pragma unroll
            for (int i = 0; i < D / kWarp; ++i) product += q.x[i] * key[j].x[i];
            score[j] = first + j < tokens ? warp_reduce<Sum>(product) : kNothing;
            now = fmaxf(now, score[j]);
        }
        const float rescale = ptx::exp2_approx(sums.top - now);
        sums.top = now, sums.total *= rescale;
#pragma unroll
        for (int i = 0; i < D / kWarp; ++i) sums.out.x[i] *= rescale;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const float weight = ptx::exp2_approx(score[j] - (now - kWeightBits));
            sums.total += weight;
#pragma unroll
            for (int i = 0; i < D / kWarp; ++i) sums.out.x[i] += weight * value[j].x[i];
        }
    }
    return sums;
}

// This warp's query heads, of the `group` that share a kv head: loaded first, made into operands when tiles are on
// their way.
template <class T, int D, int HeadTiles>
struct WarpQueries {
    static constexpr int kCount = HeadTiles * 8 / kWarps;
    HeadVector<D> x[kCount];
    int warp, lane, group;

    __device__ __forceinline__ WarpQueries(const T* q, int group, int warp, int lane)
        : x{}, warp(warp), lane(lane), group(group) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (warp + kWarps * i < group) x[i].load(q + (warp + kWarps * i) * D, lane);
    }

    // RoPE (without it, cos is null), Hadamard transform, and `scale`.
    template <int Groups>
    __device__ __forceinline__ void prepare(const T* cos, const T* sin, bool rotate, float scale,
                                            QueryTile<D, Groups, HeadTiles>& queries) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            if (warp + kWarps * i < group) {
                if (cos != nullptr) x[i].template rope<T>(cos, sin, lane);
                if (rotate) x[i].hadamard(lane);
#pragma unroll
                for (int j = 0; j < D / kWarp; ++j) x[i].x[j] *= scale;
            }
            queries.store(x[i], warp + kWarps * i, lane);
        }
    }

    // Each query's attention to floating-point keys and values [tokens, D]; after `prepare`.
    __device__ __forceinline__ void attend(const T* keys, const T* values, int tokens, HeadSums<D> (&sums)[kCount]) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            if (warp + kWarps * i < group) sums[i] = attend_to_floats<T, D>(x[i], keys, values, tokens, lane);
    }
};

// Grid (splits, kv_heads, batch). The tokens present are shared out among the splits whatever their number, so a
// captured launch serves every length. The first `prefix` of them are those of k_prefix and v_prefix
// [kv_heads, prefix, D], keys after RoPE and the Hadamard transform, and the cache holds nothing in their places; the
// first split attends to them while its first tiles are on their way. Strides are in elements; `scale` is
// log2(e) / sqrt(D).
template <class T, int D, int Groups, int HeadTiles, int Stages>
__global__ void __launch_bounds__(kWarps* kWarp, HeadTiles == 1 && Groups < 4 ? 2 : 1)
    kv_attention(const T* q, long long q_batch, const T* cos, const T* sin, int cos_batch, const unsigned char* k_codes,
                 const unsigned char* v_codes, const Params<Groups>* k_params, const Params<Groups>* v_params,
                 const T* k_prefix, const T* v_prefix, int prefix, const int* lengths, int new_tokens, const int* table,
                 int pages, int per_sequence, int page_size, int group, int rotate, float scale, float* workspace,
                 int* counters, T* out) {
    ptx::follow_previous_launch();
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ QueryTile<D, Groups, HeadTiles> queries;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int kv_head = blockIdx.y, sequence = blockIdx.z, kv_heads = gridDim.y;
    WarpQueries<T, D, HeadTiles> mine(q + sequence * q_batch + kv_head * group * D, group, warp, lane);
    const Pages book{table, pages, per_sequence, page_size};
    const int length = min(max(lengths[sequence] + new_tokens, 0), book.capacity());
    const Share share((length + kTile<D> - 1) / kTile<D>, blockIdx.x, gridDim.x);
    if (blockIdx.x >= share.splits) return;

    float k_scale = 1.f, v_scale = 1.f;
    if constexpr (Groups == kStatic) k_scale = k_params[kv_head], v_scale = v_params[kv_head];
    const Pools<D, Groups> pools{k_codes, v_codes, k_params, v_params};
    Reader<D, Groups, kTile<D>, Stages> reader(reinterpret_cast<Ring<D, Groups, kTile<D>, Stages>*>(shared)[warp],
                                               lane);
    int next = share.first + warp;
    auto fetch_next = [&] {
        const int token = next * kTile<D>;
        if (next < share.last)
            reader.fetch(pools, book.plane(sequence, token, kv_head, kv_heads) * page_size + token % page_size);
        else
            reader.fetch_nothing();
        next += kWarps;
    };
#pragma unroll
    for (int i = 0; i < Stages - 1; ++i) fetch_next();

    const int angles = sequence * cos_batch * D;
    mine.prepare(cos == nullptr ? cos : cos + angles, sin + angles, rotate, scale, queries);
    __syncthreads();
    Queries<D, Groups> operand[HeadTiles];
    queries.load(operand, lane);
    HeadSums<D> before[HeadTiles] = {};
    const bool prefixed = prefix > 0 && blockIdx.x == 0;
    if (prefixed) {
        const long long first = static_cast<long long>(kv_head) * prefix * D;
        mine.attend(k_prefix + first, v_prefix + first, prefix, before);
    }
    const u32 count = max(length - prefix, 0);
    Accumulator<D, Groups, HeadTiles> sums;
    sums.clear();
    for (int tile = share.first + warp; tile < share.last; tile += kWarps) {
        const Tile<D, Groups>& here = reader.wait();
        fetch_next();
        float score[kTile<D> / 16][HeadTiles][4];
#pragma unroll
        for (int b = 0; b < kTile<D> / 16; ++b) {
            TokenParams<Groups> params;
            if constexpr (Groups == kStatic)
                params = {k_scale};
            else
                params = {here.k_params + b * 16 * Groups};
            score_block<D, Groups, HeadTiles>(score[b], here.k + b * (8 * D), params, operand, lane);
        }
        sums.add(score, here, Present{prefix - tile * kTile<D>, count}, lane);
        reader.pop();
    }
    reader.close();
    sums.reduce_totals();

    const long long pair = static_cast<long long>(sequence) * kv_heads + kv_head;
    const Partial<D> partial{workspace + pair * gridDim.x * group * (D + 4), group};
    T* target = out + pair * group * D;
    merge_warps<0>(sums, v_scale, before, prefixed, *reinterpret_cast<Merge<D>*>(shared), partial, blockIdx.x,
                   share.splits, target);
    if (share.splits > 1 && is_last(counters + pair, share.splits))
        combine<T, D>(partial, share.splits, target, reinterpret_cast<float (*)[kMaxSplits]>(shared));
}

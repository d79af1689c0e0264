// Decode attention on a 4-bit KV cache: one query per sequence and head, split over the sequence (QuaRot Sec. 4, stages
// 1d and 2c). Warps take tiles of tokens in turn, each with a running softmax of its own; their sums are merged in shared
// memory, and the splits' sums by the last block to finish. Keys and values are never dequantized. sm_80 and newer.

#include "kv_softmax.cuh"

using namespace kv;

constexpr int WARPS = 8;
constexpr int MAX_SPLITS = 64;

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
__global__ void __launch_bounds__(WARPS * WARP, NT == 1 && GROUPS < 4 ? 2 : 1)
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
    const int tiles = (length + TILE<D> - 1) / TILE<D>;
    const int per_split = max(1, (tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
    const int splits = max(1, (tiles + per_split - 1) / per_split);
    if (split >= splits) return;

    const Pools<D, GROUPS> pools{k_codes, v_codes, k_params, v_params};
    Reader<D, GROUPS, TILE<D>, STAGES> reader(reinterpret_cast<Ring<D, GROUPS, TILE<D>, STAGES>*>(shared)[warp], lane);
    const int last = min((split + 1) * per_split, tiles);
    int next = split * per_split + warp;
    auto fetch_next = [&] {
        const int token = next * TILE<D>;
        if (next < last)
            reader.fetch(pools, book.plane(sequence, token, kv_head, kv_heads) * page_size + token % page_size);
        else
            reader.fetch_nothing();
        next += WARPS;
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
    for (int tile = split * per_split + warp; tile < last; tile += WARPS) {
        const Tile<D, GROUPS>& here = reader.wait();
        fetch_next();
        float score[TILE<D> / 16][NT][4];
#pragma unroll
        for (int b = 0; b < TILE<D> / 16; ++b)
            score_block<D, GROUPS, NT>(score[b], here.k + b * (8 * D), here.k_params + b * 16 * GROUPS, operand, lane);
        sums.add(score, here, length - tile * TILE<D>, lane);
        reader.pop();
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

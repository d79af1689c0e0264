// Products of few rows with 2-bit look-up-table weights (RCP Sec. 4.4). Architectures: sm_80 and newer.
//
// A weight is one of four levels of its output row and group of 128 inputs. Within a group
//     y = sum_i level[i] * (sum of the activations whose weight has code i),
// and the inner sums are sums of integers over sets: with the sets and the activations' binary digits as bit masks, a
// binary tensor-core product (AND, population count) of 16 output rows x 256 inputs x 8 columns is one instruction, and
// the 2-bit codes need no unpacking at all. Integer sums are exact; levels multiply them in float32.
#include "epilogue/output.cuh"
#include "lut/digits.cuh"
#include "mma/warp.cuh"

namespace {

using namespace lut;

constexpr int kStrip = 16;

// ---- sums over a pair of groups ----

// Sixteen output rows x 256 inputs as lane 4 g + t holds them. Words of codes: the low bits and the high bits of row g,
// then of row g + 8, for inputs 32 t to 32 t + 31 of each group. Tables: four levels of row g, then of row g + 8.
template <int Tables>
struct Pair {
    uint4 codes[2];
    uint4 table[Tables];
};

// Inputs whose weight has each of the codes, for rows g and g + 8.
struct Sets {
    u32 of[4][2];
};

__device__ __forceinline__ Sets make_sets(const uint4& codes) {
    const u32 low[2] = {codes.x, codes.z}, high[2] = {codes.y, codes.w};
    Sets sets;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sets.of[0][h] = ~(low[h] | high[h]);
        sets.of[1][h] = low[h] & ~high[h];
        sets.of[2][h] = high[h] & ~low[h];
        sets.of[3][h] = low[h] & high[h];
    }
    return sets;
}

struct Levels {
    float of[4][2];
};

__device__ __forceinline__ Levels make_levels(const uint4& table) {
    const u32 words[4] = {table.x, table.y, table.z, table.w};
    Levels levels;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = Float16<__half>::unpack(words[i]);
        levels.of[i % 2 * 2][i / 2] = pair.x, levels.of[i % 2 * 2 + 1][i / 2] = pair.y;
    }
    return levels;
}

// What a lane has to know about the columns 2 t and 2 t + 1 of a tile that its sums belong to.
struct Columns {
    int top;       // weight of the second over the first in the tile of the highest digits: 2, or -2 for the sign
    float weight;  // of the first
    u32 mask[2];   // all ones where column g of a tile of codes belongs to the pair's first, second group
};

template <bool Codes>
__device__ __forceinline__ Columns make_columns() {
    const int lane = threadIdx.x % 32, t = Codes ? lane % 2 : lane % 4, last = Codes ? 1 : 3;
    return {t == last ? -2 : 2, static_cast<float>(1 << (2 * t)), {lane < 16 ? ~0u : 0u, lane < 16 ? 0u : ~0u}};
}

// acc[row] += levels times sums of this lane's two digits, for 4-bit codes: lanes with t < 2 have the first group.
template <int Rows>
__device__ __forceinline__ void add_pair(float (&acc)[Rows][2], const Pair<1>& pair, const u32* tiles, const float*,
                                         const Columns& columns) {
    const Sets first = make_sets(pair.codes[0]), second = make_sets(pair.codes[1]);
    const Levels levels = make_levels(pair.table[0]);
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
        const u32 word = tiles[row * kTile + threadIdx.x % 32];
        const u32 b0 = word & columns.mask[0], b1 = word & columns.mask[1];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int d[4];
            ptx::mma_m16n8k256_and(d, first.of[i][0], first.of[i][1], second.of[i][0], second.of[i][1], b0, b1);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int sum = d[2 * h + 1] * columns.top + d[2 * h];
                acc[row][h] = fmaf(levels.of[i][h], __int2float_rn(sum), acc[row][h]);
            }
        }
    }
}

// The same for 24 digits.
template <int Rows>
__device__ __forceinline__ void add_pair(float (&acc)[Rows][2], const Pair<2>& pair, const u32* tiles,
                                         const float* units, const Columns& columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Sets sets = make_sets(pair.codes[half]);
        const Levels levels = make_levels(pair.table[half]);
#pragma unroll
        for (int row = 0; row < Rows; ++row) {
            const u32* words = tiles + (half * Rows + row) * 3 * kTile + threadIdx.x % 32;
            const u32 low = words[0], middle = words[kTile], high = words[2 * kTile];
            const float unit = units[half * Rows + row];
            float group[2] = {0.f, 0.f};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int a[4], b[4], c[4];
                ptx::mma_m16n8k128_and(a, sets.of[i][0], sets.of[i][1], low);
                ptx::mma_m16n8k128_and(b, sets.of[i][0], sets.of[i][1], middle);
                ptx::mma_m16n8k128_and(c, sets.of[i][0], sets.of[i][1], high);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    int sum = c[2 * h + 1] * columns.top + c[2 * h];
                    sum = sum * 256 + b[2 * h] + b[2 * h + 1] * 2;
                    sum = sum * 256 + a[2 * h] + a[2 * h + 1] * 2;
                    group[h] = fmaf(levels.of[i][h], __int2float_rn(sum), group[h]);
                }
            }
            acc[row][0] = fmaf(group[0], unit, acc[row][0]);
            acc[row][1] = fmaf(group[1], unit, acc[row][1]);
        }
    }
}

// A warp's sums of a strip, over its columns, into [Rows, 16] floats at `target` (of lane 0); then zero again.
template <int Rows>
__device__ __forceinline__ void store_sums(float (&acc)[Rows][2], float weight, float* target) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = acc[row][h] * weight;
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
            if (threadIdx.x % 4 == 0) target[row * kStrip + 8 * h] = sum;
            acc[row][h] = 0.f;
        }
    }
}

// ---- the product ----

struct Problem {
    const void* x;           // [rows, inner]
    const float* row_scale;  // [rows], [1], or null
    const uint4* codes;      // [strips, 2 pairs, 32]
    const uint4* table;      // [strips, 2 pairs, 8]
    const void* bias;        // [features] of the output's type, or null
    void* out;               // [rows, features]
    int rows, features, strips, groups, pairs;
    int row_scale_step;  // 0 or 1
    int dtype;           // of the output
};

// Inputs that one thread prepares: 32 of a row and group.
struct Job {
    int row, group, t;
    size_t start;  // element of x
    bool real;     // false for the rows and the group that only fill up: zeros
};

template <int Rows>
__device__ __forceinline__ Job make_job(int index, const Problem& p) {
    const int t = index % kLanesOfGroup, row = index / kLanesOfGroup % Rows, group = index / kLanesOfGroup / Rows;
    return {row, group, t, (static_cast<size_t>(row) * p.groups + group) * kGroup + 32 * t,
            row < p.rows && group < p.groups};
}

// Half a tile of 4-bit codes for each group and row: u32 [pairs, Rows, 2, 16].
template <int Rows>
__device__ __forceinline__ u32* half_tile(u32* tiles, const Job& job) {
    return tiles + ((job.group / 2 * Rows + job.row) * 2 + job.group % 2) * (kTile / 2);
}

// All threads of the block make digits of all activations in shared memory. True if something cannot be represented.
template <int Rows, int Threads>
__device__ __forceinline__ bool prepare(const Problem& p, u32* tiles, float*, Codes4<signed char>) {
    bool bad = false;
    for (int index = threadIdx.x; index < 2 * p.pairs * Rows * kLanesOfGroup; index += Threads) {
        const Job job = make_job<Rows>(index, p);
        const uint4* from = reinterpret_cast<const uint4*>(static_cast<const signed char*>(p.x) + job.start);
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const uint4 a = job.real ? __ldg(from) : zero, b = job.real ? __ldg(from + 1) : zero;
        u32 w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        bad |= store_codes(w, half_tile<Rows>(tiles, job), job.t);
    }
    return bad;
}

template <int Rows, int Threads, class T>
__device__ __forceinline__ bool prepare(const Problem& p, u32* tiles, float* units, Digits24<T>) {
    for (int index = threadIdx.x; index < 2 * p.pairs * Rows * kLanesOfGroup; index += Threads) {
        const Job job = make_job<Rows>(index, p);
        float x[4][8] = {};
        if (job.real) load_32(static_cast<const T*>(p.x) + job.start, x);
        const int slot = job.group * Rows + job.row;
        const float unit = store_digits(x, tiles + slot * 3 * kTile, job.t);
        if (job.t == 0) units[slot] = unit;
    }
    return false;
}

__device__ __forceinline__ void finish(const Problem& p, float y, int row, int feature) {
    const size_t index = static_cast<size_t>(row) * p.features + feature;
    if (p.dtype == kFloat16) {
        if (p.bias) y += __half2float(static_cast<const __half*>(p.bias)[feature]);
        static_cast<__half*>(p.out)[index] = __float2half_rn(y);
    } else if (p.dtype == kBfloat16) {
        if (p.bias) y += __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[feature]);
        static_cast<__nv_bfloat16*>(p.out)[index] = __float2bfloat16_rn(y);
    } else {
        if (p.bias) y += static_cast<const float*>(p.bias)[feature];
        static_cast<float*>(p.out)[index] = y;
    }
}

}  // namespace

// What a row has in shared memory: tiles of two groups, and bytes of one group with the unit of its 24 digits.
template <class Kind>
constexpr int kPairTiles = kIsCodes<Kind> ? 1 : 6;
template <class Kind>
constexpr int kGroupBytes = kPairTiles<Kind> * kTile / 2 * sizeof(u32) + (kIsCodes<Kind> ? 0 : sizeof(float));
// Dynamic shared memory of a block that has so many strips and reads so many groups, an even number.
template <class Kind, int Rows, int Along>
constexpr int shared_bytes(int strips, int groups) {
    return Rows * (groups * kGroupBytes<Kind> + strips * Along * kStrip * sizeof(float));
}

// A block owns a range of strips of 16 output rows. `Across` strips are under way at a time, and `Along` warps share a
// strip's pairs of groups; a warp keeps `Depth` pairs on their way from memory, across the ends of strips. Partial sums
// meet in shared memory once, at the end, and are added in a fixed order.
//
// Dynamic shared memory: tiles u32 (codes [pairs, Rows, 32], digits [2 pairs, Rows, 3, 32]), units float
// [2 pairs, Rows] (digits only), partial sums float [strips of a block, Along, Rows, 16].
template <class Kind, int Rows, int Across, int Along, int Depth>
__global__ void __launch_bounds__(32 * Across * Along, 1) lut_gemv(Problem p) {
    extern __shared__ u32 shared[];
    constexpr bool kCodes = kIsCodes<Kind>;
    constexpr int kTables = kCodes ? 1 : 2;
    constexpr int kThreads = 32 * Across * Along, kPairWords = Rows * kTile * kPairTiles<Kind>;
    u32* tiles = shared;
    float* units = reinterpret_cast<float*>(tiles + p.pairs * kPairWords);
    float* partial = units + (kCodes ? 0 : 2 * p.pairs * Rows);

    ptx::release_next_launch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int along = warp % Along, across = warp / Along;
    const u32 begin = blockIdx.x * p.strips / gridDim.x, end = (blockIdx.x + 1) * p.strips / gridDim.x;
    const int block_strips = end - begin;
    const int share = (p.pairs + Along - 1) / Along;
    const int first_pair = along * share, warp_pairs = max(0, min(share, p.pairs - first_pair));

    // Where the next load reads; from the last pair of a strip to the first of the warp's next strip it is a jump.
    const int todo = (block_strips - across + Across - 1) / Across * warp_pairs;
    const int jump = Across * p.pairs - warp_pairs + 1;
    const size_t start = static_cast<size_t>(begin + across) * p.pairs + first_pair;
    const uint4* codes = p.codes + start * 64 + lane;
    const uint4* table = p.table + start * 16 + (kCodes ? lane / 4 + lane % 4 / 2 * 8 : lane / 4);
    int loaded = 0, in_strip = 0;
    auto load = [&](Pair<kTables>& pair) {
        const bool valid = loaded++ < todo;
        ptx::load_stream_16(pair.codes[0], codes, valid);
        ptx::load_stream_16(pair.codes[1], codes + 32, valid);
        ptx::load_stream_16(pair.table[0], table, valid);
        if (kTables == 2) ptx::load_stream_16(pair.table[kTables - 1], table + 8, valid);
        const bool last = ++in_strip == warp_pairs;
        in_strip = last ? 0 : in_strip;
        codes += last ? jump * 64 : 64;
        table += last ? jump * 16 : 16;
    };
    Pair<kTables> ring[Depth] = {};
#pragma unroll
    for (int d = 0; d < Depth; ++d) load(ring[d]);

    // The weight is on its way; what follows reads what earlier launches wrote.
    ptx::await_previous_launch();
    const bool bad = __syncthreads_or(prepare<Rows, kThreads>(p, tiles, units, Kind()));

    const Columns columns = make_columns<kCodes>();
    float acc[Rows][2] = {};
    int pair = 0;
    float* target = partial + (across * Along + along) * Rows * kStrip + lane / 4;
    auto step = [&](Pair<kTables>& current) {
        const int slot = first_pair + pair;
        add_pair<Rows>(acc, current, tiles + slot * kPairWords, units + slot * 2 * Rows, columns);
        load(current);
        if (++pair < warp_pairs) return;
        store_sums<Rows>(acc, columns.weight, target);
        pair = 0, target += Across * Along * Rows * kStrip;
    };
    int done = 0;
    for (; done + Depth <= todo; done += Depth) {
#pragma unroll
        for (int d = 0; d < Depth; ++d) step(ring[d]);
    }
#pragma unroll
    for (int d = 0; d < Depth - 1; ++d) {
        if (done + d < todo) step(ring[d]);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < block_strips * kStrip * Rows; i += kThreads) {
        const int strip = i / (kStrip * Rows), row = i / kStrip % Rows;
        const int feature = (begin + strip) * kStrip + i % kStrip;
        if (row >= p.rows || feature >= p.features) continue;
        const float* terms = partial + strip * Along * Rows * kStrip + i % (kStrip * Rows);
        float y = 0.f;
#pragma unroll
        for (int w = 0; w < Along; ++w) y += w * share < p.pairs ? terms[w * Rows * kStrip] : 0.f;
        if (p.row_scale) y *= p.row_scale[row * p.row_scale_step];
        finish(p, bad ? __uint_as_float(0x7FC00000u) : y, row, feature);
    }
}

// ---- the weight itself ----

template <class T>
__device__ __forceinline__ u32 as_pair(u32 halves) {
    const float2 pair = Float16<__half>::unpack(halves);
    return Float16<T>::pack(pair.x, pair.y);
}

// Levels of the two inputs whose codes are at bits `bit` and `bit + 8`, four 16-bit levels lying in two words.
__device__ __forceinline__ u32 look_up(const u32 (&levels)[2], u32 low, u32 high, int bit) {
    const u32 first = (low >> bit & 1u) | (high >> bit & 1u) << 1;
    const u32 second = (low >> (bit + 8) & 1u) | (high >> (bit + 8) & 1u) << 1;
    return __byte_perm(levels[0], levels[1], 0x1010u + 0x22u * first + 0x2200u * second);
}

constexpr int kDequantizeWarps = 8;

// [strips * 16, groups * 128] of T, for many rows, where a library's product is faster. A warp per strip and group.
template <class T>
__global__ void __launch_bounds__(32 * kDequantizeWarps)
    lut_dequantize(const uint4* codes, const uint4* table, T* out, int strips, int groups, int pairs) {
    const int index = (blockIdx.x * 32 * kDequantizeWarps + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int strip = index / groups, group = index % groups;
    if (strip >= strips) return;
    const size_t unit = static_cast<size_t>(strip) * 2 * pairs + group;
    const uint4 words = codes[unit * 32 + lane], levels = table[unit * 8 + lane / 4];
    const u32 low[2] = {words.x, words.z}, high[2] = {words.y, words.w};
    const u32 halves[2][2] = {{as_pair<T>(levels.x), as_pair<T>(levels.y)},
                              {as_pair<T>(levels.z), as_pair<T>(levels.w)}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const size_t row = static_cast<size_t>(strip) * kStrip + lane / 4 + 8 * h;
        uint4* target = reinterpret_cast<uint4*>(out + (row * groups + group) * kGroup + lane % 4 * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = look_up(halves[h], low[h], high[h], 2 * i + j / 2 + j % 2 * 16);
            target[i] = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

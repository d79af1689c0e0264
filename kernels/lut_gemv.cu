// Products of few rows with 2-bit look-up-table weights (RCP Sec. 4.4). Architectures: sm_80 and newer.
//
// A weight is one of four levels of its output row and group of 128 inputs. Within a group
//     y = sum_i level[i] * (sum of the activations whose weight has code i),
// and the inner sums are sums of integers over sets: with the sets and the activations' binary digits as bit masks, a
// binary tensor-core product (AND, population count) of 16 output rows x 128 inputs x 8 digits is one instruction, and
// the 2-bit codes need no unpacking at all. Integer sums are exact; levels multiply them in float32.
//
// Activations are int8 (eight digits) or 16-bit floats, which become 24-digit integers under a power of two per row
// and group: at least as good as adding in float32, and exact where a group spans at most 2^12.
#include "ptx.cuh"

namespace {

using ptx::u32;

constexpr int kGroup = 128;
constexpr int kStrip = 16;
// Bits of 1.5 * 2^23: added to an integer below 2^22 in magnitude they are the float 1.5 * 2^23 + integer.
constexpr u32 kFloatOffset = 0x4B400000u;

// ---- instructions ----

// d = c + popcount(a & b): A [16, 128], B [128, 8] bits. Lane 4 g + t has rows g and g + 8 of A, bits 32 t to 32 t + 31;
// column g of B, the same bits; rows g and g + 8 of D, columns 2 t and 2 t + 1.
__device__ __forceinline__ void mma_m16n8k128_and(int (&d)[4], u32 a0, u32 a1, u32 b, int c_even, int c_odd) {
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %7, "
        "%8};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(c_even), "r"(c_odd));
}

// 16 bytes that are read once: past L1.
__device__ __forceinline__ uint4 load_stream_16(const uint4* pointer) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer));
    return v;
}

// ---- activations to binary digits ----

// Tensor-core tiles of eight digits per activation row.
template <class X>
constexpr int kTiles = sizeof(X) == 1 ? 1 : 3;

template <int Distance, u32 Mask>
__device__ __forceinline__ void exchange(u32& a, u32& b) {
    const u32 low = (a & Mask) | ((b << Distance) & ~Mask);
    b = ((a >> Distance) & Mask) | (b & ~Mask);
    a = low;
}

// Word r, byte b holds value 4 r + b; afterwards bit r of byte b of word j is digit j of value 4 r + b.
__device__ __forceinline__ void transpose_digits(u32 (&w)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exchange<4, 0x0F0F0F0Fu>(w[i], w[i + 4]);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        exchange<2, 0x33333333u>(w[i], w[i + 2]);
        exchange<2, 0x33333333u>(w[i + 1], w[i + 3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i += 2) exchange<1, 0x55555555u>(w[i], w[i + 1]);
}

__device__ __forceinline__ void store_digits(u32* tile, int t, u32 (&w)[8]) {
    transpose_digits(w);
#pragma unroll
    for (int j = 0; j < 8; ++j) tile[4 * j + t] = w[j];
}

__device__ __forceinline__ float low_float(u32 pair, __half) { return __half2float(__ushort_as_half(pair & 0xFFFFu)); }
__device__ __forceinline__ float high_float(u32 pair, __half) { return __half2float(__ushort_as_half(pair >> 16)); }
__device__ __forceinline__ float low_float(u32 pair, __nv_bfloat16) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(u32 pair, __nv_bfloat16) { return __uint_as_float(pair & 0xFFFF0000u); }

// 32 consecutive int8 values as one tile's words of thread t.
__device__ __forceinline__ void split_digits(const uint4 (&x)[2], signed char, u32* tiles, float*, int t) {
    u32 w[8] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w};
    store_digits(tiles, t, w);
}

// 32 consecutive 16-bit floats as three tiles' words of thread t; the four threads of a group call together. `unit` is
// the value of the last digit, a power of two, or NaN where a value of the group is not finite.
template <class X>
__device__ __forceinline__ void split_digits(const uint4 (&x)[4], X, u32* tiles, float* unit, int t) {
    const u32 pairs[16] = {x[0].x, x[0].y, x[0].z, x[0].w, x[1].x, x[1].y, x[1].z, x[1].w,
                           x[2].x, x[2].y, x[2].z, x[2].w, x[3].x, x[3].y, x[3].z, x[3].w};
    u32 magnitude = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        magnitude = max(magnitude, __float_as_uint(low_float(pairs[i], X())) & 0x7FFFFFFFu);
        magnitude = max(magnitude, __float_as_uint(high_float(pairs[i], X())) & 0x7FFFFFFFu);
    }
    const u32 four_lanes = 0xFu << (threadIdx.x % 32 / 4 * 4);
    magnitude = max(magnitude, __shfl_xor_sync(four_lanes, magnitude, 1));
    magnitude = max(magnitude, __shfl_xor_sync(four_lanes, magnitude, 2));
    // |x| < 2^(exponent - 126), so |x| / 2^(exponent - 148) < 2^22.
    const u32 exponent = max(magnitude >> 23, 22u);
    const float to_integer = __uint_as_float((275u - exponent) << 23);
    if (t == 0) *unit = exponent == 255u ? __uint_as_float(0x7FC00000u) : __uint_as_float((exponent - 21u) << 23);
    u32 low[8], middle[8], high[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = i % 2 ? high_float(pairs[2 * r + i / 2], X()) : low_float(pairs[2 * r + i / 2], X());
            v[i] = __float_as_uint(fmaf(value, to_integer, __uint_as_float(kFloatOffset))) - kFloatOffset;
        }
        const u32 a = __byte_perm(v[0], v[1], 0x5140), b = __byte_perm(v[2], v[3], 0x5140);
        low[r] = __byte_perm(a, b, 0x5410);
        middle[r] = __byte_perm(a, b, 0x7632);
        high[r] = __byte_perm(__byte_perm(v[0], v[1], 0x62), __byte_perm(v[2], v[3], 0x62), 0x5410);
    }
    store_digits(tiles, t, low);
    store_digits(tiles + 32, t, middle);
    store_digits(tiles + 64, t, high);
}

// ---- sums over one group ----

// Sixteen output rows x 128 inputs as lane 4 g + t holds them.
struct Unit {
    uint4 codes;  // low bits and high bits of row g, then of row g + 8; inputs 32 t to 32 t + 31
    uint4 table;  // four levels of row g, then of row g + 8
};

// The same, made ready: levels, and the set of inputs that have each.
struct Sets {
    u32 members[4][2];
    float level[4][2];
};

__device__ __forceinline__ Sets make_sets(const Unit& unit) {
    Sets s;
    const u32 low[2] = {unit.codes.x, unit.codes.z}, high[2] = {unit.codes.y, unit.codes.w};
    const u32 table[2][2] = {{unit.table.x, unit.table.y}, {unit.table.z, unit.table.w}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        s.members[0][h] = ~(low[h] | high[h]);
        s.members[1][h] = low[h] & ~high[h];
        s.members[2][h] = high[h] & ~low[h];
        s.members[3][h] = low[h] & high[h];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s.level[i][h] = i % 2 ? high_float(table[h][i / 2], __half()) : low_float(table[h][i / 2], __half());
        }
    }
    return s;
}

// acc += levels times sums of this lane's two digits, in units of the lane's lower digit. `top` is the weight of the
// upper digit of the highest tile: 2, or -2 where it is the sign.
__device__ __forceinline__ void add_group(float (&acc)[2], const Sets& s, const u32* tile, float, int top, signed char) {
    const u32 digits = tile[threadIdx.x % 32];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int d[4];
        mma_m16n8k128_and(d, s.members[i][0], s.members[i][1], digits, kFloatOffset, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float sum = __int_as_float(d[2 * h + 1] * top + d[2 * h]) - __uint_as_float(kFloatOffset);
            acc[h] = fmaf(s.level[i][h], sum, acc[h]);
        }
    }
}

template <class X>
__device__ __forceinline__ void add_group(float (&acc)[2], const Sets& s, const u32* tile, float unit, int top, X) {
    const u32* digits = tile + threadIdx.x % 32;
    const u32 low = digits[0], middle = digits[32], high = digits[64];
    float group[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int a[4], b[4], c[4];
        mma_m16n8k128_and(a, s.members[i][0], s.members[i][1], low, 0, 0);
        mma_m16n8k128_and(b, s.members[i][0], s.members[i][1], middle, 0, 0);
        mma_m16n8k128_and(c, s.members[i][0], s.members[i][1], high, 0, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int sum = c[2 * h + 1] * top + c[2 * h];
            sum = sum * 256 + b[2 * h] + b[2 * h + 1] * 2;
            sum = sum * 256 + a[2 * h] + a[2 * h + 1] * 2;
            group[h] = fmaf(s.level[i][h], __int2float_rn(sum), group[h]);
        }
    }
    acc[0] = fmaf(group[0], unit, acc[0]);
    acc[1] = fmaf(group[1], unit, acc[1]);
}

// ---- levels of single weights ----

template <class T>
__device__ __forceinline__ u32 as_pair(u32 halves);
template <>
__device__ __forceinline__ u32 as_pair<__half>(u32 halves) {
    return halves;
}
template <>
__device__ __forceinline__ u32 as_pair<__nv_bfloat16>(u32 halves) {
    const u32 low = __bfloat16_as_ushort(__float2bfloat16_rn(low_float(halves, __half())));
    return low | static_cast<u32>(__bfloat16_as_ushort(__float2bfloat16_rn(high_float(halves, __half())))) << 16;
}

// Levels of the two inputs whose codes are at bits `bit` and `bit + 8`, four 16-bit levels lying in two words.
__device__ __forceinline__ u32 look_up(const u32 (&levels)[2], u32 low, u32 high, int bit) {
    const u32 first = (low >> bit & 1u) | (high >> bit & 1u) << 1;
    const u32 second = (low >> (bit + 8) & 1u) | (high >> (bit + 8) & 1u) << 1;
    return __byte_perm(levels[0], levels[1], 0x1010u + 0x22u * first + 0x2200u * second);
}

// ---- the product ----

struct Problem {
    const void* x;           // [rows, inner]
    const float* row_scale;  // [rows], [1], or null
    const uint4* codes;      // [strips, groups, 32]
    const uint4* table;      // [strips, groups, 8]
    const void* bias;        // [features] of the output's type, or null
    void* out;               // [rows, features]
    int rows, features, strips, groups;
    int row_scale_step;  // 0 or 1
    int dtype;           // of the output: 0 float16, 1 bfloat16, 2 float32
};

// Digits of some groups of all rows, by one warp, into shared memory; rows that do not exist are zeros.
template <class X, int Rows>
__device__ __forceinline__ void prepare(const Problem& p, int first_group, int groups, u32* digits, float* units) {
    constexpr int kLoads = 2 * sizeof(X);
    const int t = threadIdx.x % 4;
    for (int job = threadIdx.x % 32; job < groups * Rows * 4; job += 32) {
        const int group = first_group + job / 4 / Rows, row = job / 4 % Rows;
        const size_t start = (static_cast<size_t>(row) * p.groups + group) * kGroup + 32 * t;
        const uint4* source = reinterpret_cast<const uint4*>(static_cast<const X*>(p.x) + start);
        uint4 x[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) x[i] = row < p.rows ? __ldg(source + i) : make_uint4(0, 0, 0, 0);
        const int slot = group * Rows + row;
        split_digits(x, X(), digits + slot * 32 * kTiles<X>, units + slot, t);
    }
    __syncwarp();
}

__device__ __forceinline__ void finish(const Problem& p, float y, int row, int feature) {
    const size_t index = static_cast<size_t>(row) * p.features + feature;
    if (p.dtype == 0) {
        if (p.bias) y += __half2float(static_cast<const __half*>(p.bias)[feature]);
        static_cast<__half*>(p.out)[index] = __float2half_rn(y);
    } else if (p.dtype == 1) {
        if (p.bias) y += __bfloat162float(static_cast<const __nv_bfloat16*>(p.bias)[feature]);
        static_cast<__nv_bfloat16*>(p.out)[index] = __float2bfloat16_rn(y);
    } else {
        if (p.bias) y += static_cast<const float*>(p.bias)[feature];
        static_cast<float*>(p.out)[index] = y;
    }
}

}  // namespace

// A block owns a range of strips, each of its warps a range of groups: the warp prepares the activations of its groups
// once, then walks strip after strip through them with `Depth` units always under way from memory. Partial sums meet
// in shared memory, once, at the end, in a fixed order.
//
// Dynamic shared memory: digits u32 [groups, Rows, tiles, 32], units float [groups, Rows] (16-bit floats only),
// partial sums float [strips of a block, Warps, Rows, 16].
template <class X, int Rows, int Warps, int Depth>
__global__ void __launch_bounds__(32 * Warps, Warps <= 8 ? 2 : 1) lut_gemv(Problem p) {
    extern __shared__ u32 shared[];
    constexpr int kRowWords = 32 * kTiles<X>;
    u32* digits = shared;
    float* units = reinterpret_cast<float*>(digits + p.groups * Rows * kRowWords);
    float* partial = units + (kTiles<X> > 1 ? p.groups * Rows : 0);

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int first_strip = static_cast<int>(static_cast<long long>(blockIdx.x) * p.strips / gridDim.x);
    const int block_strips = static_cast<int>(static_cast<long long>(blockIdx.x + 1) * p.strips / gridDim.x) - first_strip;
    const int share = (p.groups + Warps - 1) / Warps;
    const int first_group = warp * share, warp_groups = max(0, min(share, p.groups - first_group));
    const int count = block_strips * warp_groups;

    // What the next load takes: unit `next`, `in_strip` of its strip.
    size_t address = static_cast<size_t>(first_strip) * p.groups + first_group;
    int next = 0, in_strip = 0;
    auto load = [&]() {
        Unit unit;
        if (next < count) {
            unit.codes = load_stream_16(p.codes + address * 32 + lane);
            unit.table = load_stream_16(p.table + address * 8 + lane / 4);
        }
        ++next, ++address;
        if (++in_strip == warp_groups) in_strip = 0, address += p.groups - warp_groups;
        return unit;
    };
    Unit ring[Depth];
#pragma unroll
    for (int d = 0; d < Depth; ++d) ring[d] = load();

    prepare<X, Rows>(p, first_group, warp_groups, digits, units);

    const int top = t == 3 ? -2 : 2;
    const float lane_weight = static_cast<float>(1 << (2 * t));
    float acc[Rows][2] = {};
    int strip = 0, group = 0;
    for (int base = 0; base < count; base += Depth) {
#pragma unroll
        for (int d = 0; d < Depth; ++d) {
            if (base + d < count) {
                const Sets sets = make_sets(ring[d]);
                ring[d] = load();
                const int slot = (first_group + group) * Rows;
#pragma unroll
                for (int row = 0; row < Rows; ++row) {
                    const float unit = kTiles<X> > 1 ? units[slot + row] : 1.f;
                    add_group(acc[row], sets, digits + (slot + row) * kRowWords, unit, top, X());
                }
                if (++group == warp_groups) {
                    float* mine = partial + (strip * Warps + warp) * Rows * kStrip + lane / 4;
#pragma unroll
                    for (int row = 0; row < Rows; ++row) {
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float sum = acc[row][h] * lane_weight;
                            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
                            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
                            if (t == 0) mine[row * kStrip + 8 * h] = sum;
                            acc[row][h] = 0.f;
                        }
                    }
                    group = 0, ++strip;
                }
            }
        }
    }
    __syncthreads();

    for (int i = threadIdx.x; i < block_strips * kStrip * Rows; i += 32 * Warps) {
        const int row = i / kStrip % Rows, feature = (first_strip + i / (kStrip * Rows)) * kStrip + i % kStrip;
        if (row >= p.rows || feature >= p.features) continue;
        const float* terms = partial + (i / (kStrip * Rows)) * Warps * Rows * kStrip + i % (kStrip * Rows);
        float y = 0.f;
        for (int w = 0; w * share < p.groups; ++w) y += terms[w * Rows * kStrip];
        if (p.row_scale) y *= p.row_scale[row * p.row_scale_step];
        finish(p, y, row, feature);
    }
}

// The weight itself, [strips * 16, groups * 128] of T: for many rows, where a library's product is faster.
// A warp per strip and group; `units` of them.
template <class T>
__global__ void __launch_bounds__(256) lut_dequantize(const uint4* codes, const uint4* table, T* out, int groups,
                                                      int units) {
    const int index = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (index >= units) return;
    const uint4 words = codes[static_cast<size_t>(index) * 32 + lane];
    const uint4 levels = table[static_cast<size_t>(index) * 8 + lane / 4];
    const u32 low[2] = {words.x, words.z}, high[2] = {words.y, words.w};
    const u32 pairs[2][2] = {{as_pair<T>(levels.x), as_pair<T>(levels.y)}, {as_pair<T>(levels.z), as_pair<T>(levels.w)}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const size_t row = static_cast<size_t>(index / groups) * kStrip + lane / 4 + 8 * h;
        uint4* target = reinterpret_cast<uint4*>(out + (row * groups + index % groups) * kGroup + lane % 4 * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 v[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) v[j] = look_up(pairs[h], low[h], high[h], 2 * i + j / 2 + j % 2 * 16);
            target[i] = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

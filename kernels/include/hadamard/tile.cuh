// A 16 x 64 tile of a row seen as a matrix, in the registers of a warp: the left factor of the Hadamard matrix from its
// signs, and of the right factor what tensor cores do. sm_80 and newer.
//
// Lanes: l = 4g + t. After the left product a thread holds rows g, g + 8 of the tile and columns 8 (2t + e) + i; after
// the right one rows 8h + 2t + e and columns 8g + i, i = 0..7, as element [i][2h + e].
#pragma once

#include "values/element.cuh"
#include "mma/warp.cuh"

// The part of x that tf32 holds exactly; x minus it is exact, and tf32 holds all but its last two or three bits.
__device__ __forceinline__ float tf32_head(float x) { return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u); }

// The four registers of a 16 x 16 left operand of +-1 in 16 bits.
struct Signs {
    u32 r[4];
};

constexpr int kChunk = 64;  // columns of a tile: eight products of eight
constexpr int kTile = 16;   // rows of a tile

__device__ __forceinline__ u32 from_lane(u32 x, int source) { return __shfl_sync(0xFFFFFFFFu, x, source); }

// x, of which the compiler may not keep anything computed from it in registers across a loop.
__device__ __forceinline__ u32 recomputed(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// What lane 4g + t holds to lane 8t + g, so that eight consecutive lanes write one line of memory.
__device__ __forceinline__ uint2 in_memory_order(uint2 x, int lane) {
    const int source = lane % 8 * 4 + lane / 8;
    return {from_lane(x.x, source), from_lane(x.y, source)};
}

__device__ __forceinline__ uint4 in_memory_order(uint4 x, int lane) {
    const int source = lane % 8 * 4 + lane / 8;
    return {from_lane(x.x, source), from_lane(x.y, source), from_lane(x.z, source), from_lane(x.w, source)};
}

// The 16 x 16 tile of the left factor at position `k` of four that share a word of signs.
__device__ __forceinline__ Signs left_operand(u32 word, int k, const Signs& ones) {
    Signs a;
#pragma unroll
    for (int r = 0; r < 4; ++r) a.r[r] = ((word << (4 * k + r)) & 0x80008000u) ^ ones.r[r];
    return a;
}

// Ones of a tile, zeros outside the diagonal blocks of `size` rows.
template <class T>
__device__ __forceinline__ Signs block_ones(int size, int g, int t) {
    Signs ones;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int row = g + 8 * (r & 1), column = 2 * t + 8 * (r >> 1);
        const u32 low = row / size == column / size ? 0xFFFFu : 0u;
        const u32 high = row / size == (column + 1) / size ? 0xFFFF0000u : 0u;
        ones.r[r] = Float16<T>::kOnes & (low | high);
    }
    return ones;
}

// Which columns a thread holds after the right factor, i = 0..7. kConsecutive: 8g + i. kPacked: those that packed codes
// put into word g of a chunk, 32 (g / 4) + 4 (g % 4) + i for i < 4 and 16 more for the others.
enum ColumnOrder : int { kConsecutive, kPacked };

// An entry of the right factor over the bits of a column above the lowest two: output of lane group g and half `top` of
// i, input 8 G + 4 upper. Without Columns of the identity, which leaves the change of layout.
template <bool Columns, ColumnOrder Order>
__device__ __forceinline__ float right_entry(int g, int top, int G, int upper) {
    const int out = Order == kPacked ? g / 4 * 8 + top * 4 + g % 4 : 2 * g + top, in = 2 * G + upper;
    return Columns ? (__popc(out & in) & 1 ? -1.0f : 1.0f) : (out == in ? 1.0f : 0.0f);
}

// The right factor's part over columns 8 G (three bits, across lanes) and bit 2 of i.
template <bool Columns, ColumnOrder Order = kConsecutive>
struct RightFactor {
    float even[4], odd[4];  // left operands for columns i < 4 and i >= 4

    RightFactor() = default;

    __device__ __forceinline__ RightFactor(int g, int t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            even[r] = right_entry<Columns, Order>(g, r % 2, 2 * t + r / 2, 0);
            odd[r] = right_entry<Columns, Order>(g, r % 2, 2 * t + r / 2, 1);
        }
    }

    // Rows of half `h` of two columns, whose operands these are. Every float is the sum of two tf32 numbers, up to its
    // last two or three bits.
    __device__ __forceinline__ void apply(float (&low)[4], float (&high)[4], int h) const {
        const float x[4] = {low[2 * h], low[2 * h + 1], high[2 * h], high[2 * h + 1]};
        float head[4], sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < 4; ++j) head[j] = tf32_head(x[j]);
        ptx::mma_m16n8k8_tf32(sum, even, x[0] - head[0], x[1] - head[1]);
        ptx::mma_m16n8k8_tf32(sum, odd, x[2] - head[2], x[3] - head[3]);
        ptx::mma_m16n8k8_tf32(sum, even, head[0], head[1]);
        ptx::mma_m16n8k8_tf32(sum, odd, head[2], head[3]);
        low[2 * h] = sum[0], low[2 * h + 1] = sum[1], high[2 * h] = sum[2], high[2 * h + 1] = sum[3];
    }

    __device__ __forceinline__ void apply(float (&tile)[8][4], int h) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) apply(tile[i], tile[i + 4], h);
    }
};

// The same in float16 arithmetic: what the left product leaves, rounded, is a right operand as it stands. `halves`: for
// columns 8 (2t + e) + i of row 8h + g, both e in a word; then rows 8h + 2t + e of the columns that Order says.
template <ColumnOrder Order = kConsecutive>
struct HalfRightFactor {
    Signs entries;  // of +-1/8: sixteen-fold sums, and the bits that follow, stay about as large as what comes in

    __device__ __forceinline__ HalfRightFactor(int g, int t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float a = right_entry<true, Order>(g, r % 2, 2 * t, r / 2);
            const float b = right_entry<true, Order>(g, r % 2, 2 * t + 1, r / 2);
            entries.r[r] = Float16<__half>::pack(0.125f * a, 0.125f * b);
        }
    }

    __device__ __forceinline__ void apply(u32 (&halves)[8]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 sum[2];
            ptx::mma_m16n8k16_half(sum, entries.r, halves[i], halves[i + 4]);
            halves[i] = sum[0], halves[i + 4] = sum[1];
        }
    }
};

// Two float16 butterflies.
__device__ __forceinline__ void butterfly(u32& a, u32& b) {
    const __half2 x = reinterpret_cast<const __half2&>(a), y = reinterpret_cast<const __half2&>(b);
    const __half2 sum = __hadd2(x, y), difference = __hsub2(x, y);
    a = reinterpret_cast<const u32&>(sum), b = reinterpret_cast<const u32&>(difference);
}

// The last butterfly of a transform, and the larger magnitude of its results, which is |a| + |b| as rounded.
__device__ __forceinline__ void butterfly(float& a, float& b, float& largest) {
    largest = fmaxf(largest, fabsf(a) + fabsf(b));
    const float difference = a - b;
    a += b;
    b = difference;
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
    const float difference = a - b;
    a += b;
    b = difference;
}

// The last butterfly of a transform with its norm.
__device__ __forceinline__ void scaled_butterfly(float& a, float& b, float norm) {
    const float scaled = b * norm;
    b = fmaf(a, norm, -scaled);
    a = fmaf(a, norm, scaled);
}

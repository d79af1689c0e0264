// Hadamard transform of 16-bit rows whose left factor is small, optionally followed by quantization (QuaRot Sec. 4).
//
// A row of n values is a matrix [Order, 64 * Warps * Strips] in row-major order; a warp takes strips of 64 columns, straight
// from memory to registers. H_n = H_Order (x) H_columns: the left factor meets the 16-bit values on tensor cores, where
// products with +-1 are exact and sums float32; then come the 64 columns of each strip (hadamard_tile.cuh), and at last, after
// the warps of a row have exchanged rows for columns through shared memory, the bits of the strip's number. The next row
// is on its way meanwhile.
// Architectures: sm_80 and newer.
#include "hadamard_tile.cuh"
#include "quantize.cuh"
#include "reduce.cuh"
#include "row_ring.cuh"

using u32 = unsigned int;

// What one launch computes.
struct Problem {
    const void* x;       // [rows, n], or [rows, 2n] = (gate | up) with Gated
    void* y;             // [rows, n] in the type of x; unused with quantization
    const u32* signs;    // [tiles, ceil(tiles / 4), 32]: bit set where an entry of the left factor is -1
    Codes codes;
    long long elements;  // rows * n, of the output
    int rows;
    int blocks_of;       // the left factor is block-diagonal with blocks of so many rows
    float norm;          // 1 / sqrt(size of the transform)
};

// How a row is cut up; every member is known to the compiler.
template <class Type, int RowOrder, int RowWarps, int WarpStrips, int RingSlots, int ExchangePasses,
          bool TransformColumns, Output Result, bool IsGated>
struct Shape {
    using T = Type;
    static constexpr int kOrder = RowOrder, kWarps = RowWarps, kStrips = WarpStrips;
    static constexpr bool kColumns = TransformColumns, kGated = IsGated;
    static constexpr bool kExchange = kColumns && kWarps > 1;
    static constexpr Output kOutput = Result;
    static constexpr int kTiles = (kOrder + kTile - 1) / kTile, kSignWords = (kTiles + 3) / 4;
    static constexpr int kHalves = (kOrder + 7) / 8;       // of tiles that hold rows
    static constexpr int kLines = 2 * kHalves;             // a thread's rows, in all strips of its warp
    static constexpr int kChunks = kWarps * kStrips;
    static constexpr int kWidth = kChunk * kChunks, kElements = kOrder * kWidth;
    static constexpr int kRowsPerBlock = kWarps == 1 ? 4 : 1;
    static constexpr bool kRagged = kWarps == 1 && kOrder == kTile;  // several short transforms to a "row"
    static constexpr int kHalfBytes = 2 * kElements;  // of the input: the row, or the gate or up half of it
    static constexpr int kSlots = RingSlots, kSlotBytes = kHalfBytes * (kGated ? 2 : 1);
    using Ring = RowRing<Group<(kWarps > 1)>, kSlots, kSlotBytes>;
    static constexpr int kPasses = ExchangePasses, kQuads = 2 / kPasses;  // quads of columns exchanged at a time
    // What a thread holds in the end: some of its rows in all chunks, or all of its rows in its own strips.
    static constexpr int kFinalLines = kExchange ? (kLines + kWarps - 1) / kWarps : kLines;
    static constexpr int kFinalChunks = kExchange ? kChunks : kStrips;
    // The norm is part of the last additions, unless codes follow, which take it into their scale.
    static constexpr bool kNormInChunks = kColumns && kOutput == kSame && kFinalChunks > 1;
    static constexpr bool kNormInColumns = kColumns && kOutput == kSame && kFinalChunks == 1;
};

// Sixteen bytes of rows 2t, 2t + 1, 2t + 8, 2t + 9 of each tile, columns 8g.. of a strip. In memory order lane l holds those
// of t = l / 8, g = l % 8, so that eight lanes share a line; a product wants l = 4g + t.
template <class S>
using Pieces = uint4[S::kStrips][S::kTiles][4];

template <class S>
using Sums = float[S::kStrips][S::kTiles][8][4];

template <class S>
using Values = float[S::kFinalLines][S::kFinalChunks][8];

// From a slot of the ring. `available`: values from `from` on that are there.
template <class S>
__device__ __forceinline__ void load_pieces(Pieces<S>& pieces, const char* from, int available, int lane) {
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int line = kTile * m + 8 * (r / 2) + r % 2, at = line * S::kWidth + kChunk * s;
                const bool valid = line + 6 < S::kOrder || line + lane / 8 * 2 < S::kOrder;
                pieces[s][m][r] = {0, 0, 0, 0};
                if (valid && (!S::kRagged || at < available))
                    pieces[s][m][r] = *reinterpret_cast<const uint4*>(from + 2 * at);
            }
}

// silu(gate) * up in place of the gate.
template <class S>
__device__ __forceinline__ void gate_pieces(Pieces<S>& gate, const Pieces<S>& up) {
#pragma unroll
    for (int i = 0; i < S::kStrips * S::kTiles * 4; ++i) {
        uint4& g = (&gate[0][0][0])[i];
        const uint4& u = (&up[0][0][0])[i];
        g = {gated_pair<typename S::T>(g.x, u.x), gated_pair<typename S::T>(g.y, u.y),
             gated_pair<typename S::T>(g.z, u.z), gated_pair<typename S::T>(g.w, u.w)};
    }
}

// From memory order to that of a product.
template <class S>
__device__ __forceinline__ void order_for_product(Pieces<S>& pieces, int lane) {
    const int source = lane % 4 * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < S::kStrips * S::kTiles * 4; ++i) {
        uint4& p = (&pieces[0][0][0])[i];
        p = {from_lane(p.x, source), from_lane(p.y, source), from_lane(p.z, source), from_lane(p.w, source)};
    }
}

__device__ __forceinline__ u32 word_of(const uint4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// sums = left factor times the strips of this warp.
template <class S>
__device__ __forceinline__ void multiply_left(Sums<S>& sums, const Pieces<S>& pieces,
                                              const u32 (&signs)[S::kTiles][S::kSignWords], const Signs& ones) {
#pragma unroll
    for (int i = 0; i < S::kStrips * S::kTiles * 32; ++i) (&sums[0][0][0][0])[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < S::kTiles; ++k)
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m) {
            const Signs a = left_operand(signs[m][k / 4], k % 4, ones);
#pragma unroll
            for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const auto& p = pieces[s][k];
                    const u32 half = i % 2 ? 0x7632 : 0x5410;
                    const u32 lower = __byte_perm(word_of(p[0], i / 2), word_of(p[1], i / 2), half);
                    const u32 upper = __byte_perm(word_of(p[2], i / 2), word_of(p[3], i / 2), half);
                    mma_16n8k16<typename S::T>(sums[s][m][i], a, lower, upper);
                }
        }
}

// Bits 0 and 1 of i; `norm` is applied where nothing follows.
template <class S>
__device__ __forceinline__ void add_columns(Sums<S>& sums, float norm) {
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h)
#pragma unroll
            for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
                for (int i = 0; i < 8; ++i)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        if (i & bit) continue;
                        float& a = sums[s][h / 2][i][2 * (h % 2) + e];
                        float& b = sums[s][h / 2][i | bit][2 * (h % 2) + e];
                        if (S::kNormInColumns && bit == 2)
                            scaled_butterfly(a, b, norm);
                        else
                            butterfly(a, b);
                    }
}

// Lines of all chunks to the warps that own them: line u goes to warp u % Warps. Lanes write in the order of a product
// and read in that of memory, both without bank conflicts.
template <class S>
__device__ __forceinline__ void exchange(Values<S>& values, const Sums<S>& sums, float4* shared, int warp, int lane) {
    const int g = lane / 4, t = lane % 4, from = 8 * t + (g ^ 2 * t);
    const int to = lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2);
#pragma unroll
    for (int pass = 0; pass < S::kPasses; ++pass) {
        if (pass) __syncthreads();  // the quads before have been read
#pragma unroll
        for (int i = 0; i < S::kStrips * S::kLines * S::kQuads; ++i) {
            const int s = i / (S::kLines * S::kQuads), u = i / S::kQuads % S::kLines, q = pass + i % S::kQuads;
            const auto& x = sums[s][u / 4];
            shared[(warp * S::kStrips * S::kLines * S::kQuads + i) * 32 + from] = {
                x[4 * q][u % 4], x[4 * q + 1][u % 4], x[4 * q + 2][u % 4], x[4 * q + 3][u % 4]};
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < S::kFinalLines * S::kChunks * S::kQuads; ++i) {
            const int k = i / (S::kChunks * S::kQuads), c = i / S::kQuads % S::kChunks, q = i % S::kQuads;
            const int u = warp + S::kWarps * k;
            float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
            if (S::kLines % S::kWarps == 0 || u < S::kLines) x = shared[((c * S::kLines + u) * S::kQuads + q) * 32 + to];
            float(&v)[8] = values[k][c];
            const int at = 4 * (pass + q);
            v[at] = x.x, v[at + 1] = x.y, v[at + 2] = x.z, v[at + 3] = x.w;
        }
    }
}

// What a thread holds in the end, up to the bits of the chunk's number.
template <class S>
__device__ __forceinline__ void collect(Values<S>& values, const Sums<S>& sums, float4* shared, int warp, int lane) {
    if constexpr (S::kExchange) {
        exchange<S>(values, sums, shared, warp, lane);
    } else {
#pragma unroll
        for (int u = 0; u < S::kLines; ++u)
#pragma unroll
            for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
                for (int i = 0; i < 8; ++i) values[u][s][i] = sums[s][u / 4][i][u % 4];
    }
}

// The bits of the chunk's number, then `norm`.
template <class S>
__device__ __forceinline__ void add_chunks(Values<S>& values, float norm) {
#pragma unroll
    for (int bit = 1; bit < S::kFinalChunks; bit *= 2)
#pragma unroll
        for (int k = 0; k < S::kFinalLines; ++k)
#pragma unroll
            for (int c = 0; c < S::kFinalChunks; ++c)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (c & bit) continue;
                    if (S::kNormInChunks && 2 * bit == S::kFinalChunks)
                        scaled_butterfly(values[k][c][i], values[k][c | bit][i], norm);
                    else
                        butterfly(values[k][c][i], values[k][c | bit][i]);
                }
}

// The row's scale by its largest magnitude, or the static one; written by the row's first thread.
template <class S>
__device__ __forceinline__ float choose_scale(const Values<S>& values, const Problem& p, long long row, float* scratch,
                                              bool first_thread) {
    float scale;
    if (p.codes.static_scale) {
        scale = *p.codes.static_scale;
    } else {
        float maximum = 0.0f;
#pragma unroll
        for (int i = 0; i < S::kFinalLines * S::kFinalChunks * 8; ++i)
            maximum = fmaxf(maximum, fabsf((&values[0][0][0])[i]));
        maximum = S::kWarps > 1 ? reduce_warps<Maximum>(maximum, scratch, 0, S::kWarps) : warp_reduce<Maximum>(maximum);
        scale = dynamic_scale(maximum * p.norm, p.codes);
    }
    if (first_thread && (row == 0 || !p.codes.static_scale)) p.codes.scale[row] = scale;
    return scale;
}

template <class S>
__device__ __forceinline__ void write_values(const Values<S>& values, const Problem& p, long long row, int warp, int lane,
                                             float factor) {
    using F = Float16<typename S::T>;
#pragma unroll
    for (int k = 0; k < S::kFinalLines; ++k) {
        const int u = S::kExchange ? warp + S::kWarps * k : k;
        const int line = 4 * (u & ~1) + lane / 8 * 2 + (u & 1);
        const int first_chunk = S::kExchange ? 0 : warp * S::kStrips;
        const long long start = row * S::kElements + line * S::kWidth + first_chunk * kChunk + lane % 8 * 8;
#pragma unroll
        for (int c = 0; c < S::kFinalChunks; ++c) {
            const float(&v)[8] = values[k][c];
            const long long at = start + c * kChunk;
            const bool valid = line < S::kOrder && (!S::kRagged || at < p.elements);
            if constexpr (S::kOutput == kSame) {
                uint4 out = {F::pack(v[0] * factor, v[1] * factor), F::pack(v[2] * factor, v[3] * factor),
                             F::pack(v[4] * factor, v[5] * factor), F::pack(v[6] * factor, v[7] * factor)};
                if constexpr (!S::kExchange) out = in_memory_order(out, lane);
                if (valid) __stcs(reinterpret_cast<uint4*>(static_cast<typename S::T*>(p.y) + at), out);
            } else {
                uint2 codes = codes_of(v, factor, p.codes.largest);
                if constexpr (!S::kExchange) codes = in_memory_order(codes, lane);
                write_codes<S::kOutput>(p.codes, at, codes, 2, valid);
            }
        }
    }
}

// Each group of Warps warps takes one row after another. Dynamic shared memory: a ring of rows for each group, then, with
// an exchange, the row as float32, or half of it with two passes.
template <class Type, int Order, int Warps, int Strips, int Slots, int Passes, bool Columns, Output Result, bool Gated,
          int MinBlocks>
__global__ void __launch_bounds__(Warps == 1 ? 128 : 32 * Warps, MinBlocks) hadamard_strips(const Problem p) {
    using S = Shape<Type, Order, Warps, Strips, Slots, Passes, Columns, Result, Gated>;
    extern __shared__ float4 shared[];
    __shared__ float scratch[32];
    // One for a warp, and known to be so.
    const int warp_of_block = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    const int warp = Warps == 1 ? 0 : warp_of_block, group = Warps == 1 ? warp_of_block : 0, lane = threadIdx.x % 32;
    const typename S::Ring ring{reinterpret_cast<char*>(shared) + group * S::Ring::kBytes};
    float4* const exchanged = shared + S::kRowsPerBlock * S::Ring::kBytes / 16;
    ring.start();
    __syncthreads();

    u32 signs[S::kTiles][S::kSignWords];
#pragma unroll
    for (int i = 0; i < S::kTiles * S::kSignWords; ++i) (&signs[0][0])[i] = __ldg(p.signs + i * 32 + lane);
    const Signs ones = block_ones<Type>(p.blocks_of, lane / 4, lane % 4);
    const RightFactor<Columns> right(lane / 4, lane % 4);

    const int step = gridDim.x * S::kRowsPerBlock;
    const int offset = lane / 8 * 2 * S::kWidth + warp * Strips * kChunk + lane % 8 * 8;
    const auto fetch = [&](int slot, int row) {
        const long long left = row < p.rows ? 2 * (p.elements - (long long)row * S::kElements) : 0;
        const int bytes = S::kRagged ? (left < S::kSlotBytes ? (int)left : S::kSlotBytes) : left ? S::kSlotBytes : 0;
        ring.fetch(slot, static_cast<const char*>(p.x) + (long long)row * S::kSlotBytes, bytes);
    };
    int row = blockIdx.x * S::kRowsPerBlock + group;
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) fetch(slot, row + slot * step);

    for (int use = 0; row < p.rows; ++use, row += step) {
        const int slot = use % Slots;
        ring.wait(slot, use);
        const char* from = ring.at(slot) + 2 * offset;
        const int available = S::kRagged ? (int)min((long long)S::kElements, p.elements - (long long)row * S::kElements) : 0;
        Pieces<S> pieces;
        load_pieces<S>(pieces, from, available - offset, lane);
        if constexpr (Gated) {
            Pieces<S> up;
            load_pieces<S>(up, from + S::kHalfBytes, available - offset, lane);
            gate_pieces<S>(pieces, up);
        }
        order_for_product<S>(pieces, lane);
        Sums<S> sums;
        multiply_left<S>(sums, pieces, signs, ones);
        Group<(Warps > 1)>::sync();  // this slot, and what the last row exchanged, have been read
        fetch(slot, row + Slots * step);
#pragma unroll
        for (int s = 0; s < Strips; ++s)
#pragma unroll
            for (int h = 0; h < S::kHalves; ++h) right.apply(sums[s][h / 2], h % 2);
        if constexpr (Columns) add_columns<S>(sums, p.norm);
        Values<S> values;
        collect<S>(values, sums, exchanged, warp, lane);
        if constexpr (Columns) add_chunks<S>(values, p.norm);
        float factor = S::kNormInChunks || S::kNormInColumns ? 1.0f : p.norm;
        if constexpr (Result != kSame)
            factor = __fdividef(p.norm, choose_scale<S>(values, p, row, scratch, warp == 0 && lane == 0));
        write_values<S>(values, p, row, warp, lane, factor);
    }
}

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
#include "row_share.cuh"

#include <cuda/std/type_traits>

namespace std {
using cuda::std::conditional_t;
using cuda::std::is_same_v;
}  // namespace std

using u32 = unsigned int;

// What one launch computes.
struct Problem {
    const void* x;       // [rows, n], or [rows, 2n] = (gate | up) with Gated
    void* y;             // [rows, n] in the type of x; unused with quantization
    const u32* signs;    // [tiles, ceil(tiles / 4), 32]: bit set where an entry of the left factor is -1
    Codes codes;
    long long elements;  // rows * n, of the output
    Share share;         // of units of a row for each of the block's groups of warps
    int rows;            // units
    int blocks_of;       // the left factor is block-diagonal with blocks of so many rows
    float norm;          // 1 / sqrt(size of the transform)
};

// How a row is cut up; every member is known to the compiler.
template <class Type, int RowOrder, int RowWarps, int WarpStrips, int RingSlots, int ExchangePasses,
          bool TransformColumns, Output Result, bool IsGated, bool IsHalf>
struct Shape {
    using T = Type;
    static constexpr int kOrder = RowOrder, kWarps = RowWarps, kStrips = WarpStrips;
    static constexpr bool kColumns = TransformColumns, kGated = IsGated, kHalf = IsHalf;
    static_assert(!kHalf || (kColumns && std::is_same_v<Type, __half>));  // mixing heads rounds once as it is
    static constexpr ColumnOrder kColumnOrder = Result == kInt4 ? kPacked : kConsecutive;
    static_assert(Result != kInt4 || ExchangePasses == 1);  // a word of codes takes columns of both passes
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
    // The norm is part of the last additions, unless codes follow, which take it into their scale, or of the rounding to
    // float16 where that is the arithmetic.
    static constexpr bool kNormInChunks = kColumns && kOutput == kSame && kFinalChunks > 1 && !kHalf;
    static constexpr bool kNormInColumns = kColumns && kOutput == kSame && kFinalChunks == 1 && !kHalf;
    // Where the last additions see the row's largest magnitude.
    static constexpr bool kLargestInChunks = kColumns && kOutput != kSame && kFinalChunks > 1 && !kHalf;
    static constexpr bool kLargestInColumns = kColumns && kOutput != kSame && kFinalChunks == 1 && !kHalf;
};

// Sixteen bytes of rows 2t, 2t + 1, 2t + 8, 2t + 9 of each tile, columns 8g.. of a strip. In memory order lane l holds those
// of t = l / 8, g = l % 8, so that eight lanes share a line; a product wants l = 4g + t.
template <class S>
using Pieces = uint4[S::kStrips][S::kTiles][4];

template <class S>
using Sums = float[S::kStrips][S::kTiles][8][4];

template <class S>
using Values = float[S::kFinalLines][S::kFinalChunks][8];

// In float16 arithmetic: the same, two columns to a word; and what a product leaves, two rows to a word.
template <class S>
using HalfValues = u32[S::kFinalLines][S::kFinalChunks][4];

template <class S>
using HalfSums = u32[S::kStrips][S::kHalves][8];

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

// Bits 0 and 1 of i; `norm` is applied where nothing follows, and the largest magnitude found.
template <class S>
__device__ __forceinline__ void add_columns(Sums<S>& sums, float norm, float& largest) {
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
                        else if (S::kLargestInColumns && bit == 2)
                            butterfly(a, b, largest);
                        else
                            butterfly(a, b);
                    }
}

// The columns of every strip in float16 arithmetic, from left products times `scale`.
template <class S>
__device__ __forceinline__ void transform_halves(HalfSums<S>& halves, const Sums<S>& sums,
                                                 const HalfRightFactor<S::kColumnOrder>& right, float scale) {
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) {
            u32(&x)[8] = halves[s][h];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float(&sum)[4] = sums[s][h / 2][i];
                x[i] = Float16<__half>::pack(sum[2 * (h % 2)] * scale, sum[2 * (h % 2) + 1] * scale);
            }
            right.apply(x);
#pragma unroll
            for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!(i & bit)) butterfly(x[i], x[i | bit]);
        }
}

// Line u of a strip, two columns to a word.
template <class S>
__device__ __forceinline__ uint4 half_line(const u32 (&halves)[S::kHalves][8], int u) {
    const u32(&x)[8] = halves[u / 2];
    const u32 order = u % 2 ? 0x7632 : 0x5410;
    return {__byte_perm(x[0], x[1], order), __byte_perm(x[2], x[3], order), __byte_perm(x[4], x[5], order),
            __byte_perm(x[6], x[7], order)};
}

// `collect` in float16: a line's eight columns are exchanged at once.
template <class S>
__device__ __forceinline__ void collect_halves(HalfValues<S>& values, const HalfSums<S>& halves, uint4* shared, int warp,
                                               int lane) {
    const int g = lane / 4, t = lane % 4, from = 8 * t + (g ^ 2 * t);
    const int to = lane / 8 * 8 + (lane % 8 ^ lane / 8 * 2);
#pragma unroll
    for (int i = 0; i < S::kStrips * S::kLines; ++i) {
        const int s = i / S::kLines, u = i % S::kLines;
        const uint4 x = half_line<S>(halves[s], u);
        if constexpr (S::kExchange) {
            shared[(warp * S::kStrips * S::kLines + i) * 32 + from] = x;
        } else {
            u32(&v)[4] = values[u][s];
            v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        }
    }
    if constexpr (S::kExchange) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < S::kFinalLines * S::kChunks; ++i) {
            const int k = i / S::kChunks, c = i % S::kChunks, u = warp + S::kWarps * k;
            uint4 x = {0, 0, 0, 0};
            if (S::kLines % S::kWarps == 0 || u < S::kLines) x = shared[(c * S::kLines + u) * 32 + to];
            u32(&v)[4] = values[k][c];
            v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
        }
    }
#pragma unroll
    for (int bit = 1; bit < S::kFinalChunks; bit *= 2)
#pragma unroll
        for (int k = 0; k < S::kFinalLines; ++k)
#pragma unroll
            for (int c = 0; c < S::kFinalChunks; ++c)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (!(c & bit)) butterfly(values[k][c][j], values[k][c | bit][j]);
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

// The bits of the chunk's number, then `norm` or the largest magnitude.
template <class S>
__device__ __forceinline__ void add_chunks(Values<S>& values, float norm, float& largest) {
#pragma unroll
    for (int bit = 1; bit < S::kFinalChunks; bit *= 2)
#pragma unroll
        for (int k = 0; k < S::kFinalLines; ++k)
#pragma unroll
            for (int c = 0; c < S::kFinalChunks; ++c)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    if (c & bit) continue;
                    const bool last = 2 * bit == S::kFinalChunks;
                    if (S::kNormInChunks && last)
                        scaled_butterfly(values[k][c][i], values[k][c | bit][i], norm);
                    else if (S::kLargestInChunks && last)
                        butterfly(values[k][c][i], values[k][c | bit][i], largest);
                    else
                        butterfly(values[k][c][i], values[k][c | bit][i]);
                }
}

// A warp's part of a row in its final place: where its lines start, and which of them exist.
template <class S>
struct Place {
    long long row;
    int warp, group, word;  // a thread's lines, and its pieces of a chunk: t and g wherever lanes hold them

    __device__ __forceinline__ Place(long long row, int warp, int lane) : row(row), warp(warp) {
        const bool memory_order = S::kExchange || S::kOutput == kSame;
        group = memory_order ? lane / 8 : lane % 4;
        word = memory_order ? lane % 8 : lane / 4;
    }

    // First element of line k's chunk 0 before `word`, within the row; k = 0 plus a constant where lines are dealt evenly.
    __device__ __forceinline__ int line(int k) const {
        if constexpr (!S::kExchange) return 4 * (k & ~1) + 2 * group + (k & 1);
        if constexpr (S::kWarps % 2 == 0) return 4 * (warp & ~1) + (warp & 1) + 2 * group + 4 * S::kWarps * k;
        const int u = warp + S::kWarps * k;
        return 4 * (u & ~1) + 2 * group + (u & 1);
    }

    // Whether this is a line of the matrix, which only the last of them may not be.
    __device__ __forceinline__ bool exists(int line) const {
        return (S::kOrder % 8 == 0 && (!S::kExchange || S::kLines % S::kWarps == 0)) || line < S::kOrder;
    }

    __device__ __forceinline__ int first_chunk() const { return S::kExchange ? 0 : warp * S::kStrips; }
};

// Rows of `Type` where lanes hold eight columns as a vector of 16 bytes.
template <class S, class Vector>
__device__ __forceinline__ void write_vectors(const Vector& vector, const Problem& p, const Place<S>& place, int lane) {
    char* out = static_cast<char*>(p.y) + 2 * (place.row * S::kElements + 8 * place.word);
    const long long left = p.elements - place.row * S::kElements;
#pragma unroll
    for (int k = 0; k < S::kFinalLines; ++k) {
        const int line = place.line(k);
#pragma unroll
        for (int c = 0; c < S::kFinalChunks; ++c) {
            uint4 x = vector(k, c);
            if constexpr (!S::kExchange) x = in_memory_order(x, lane);
            const int at = line * S::kWidth + (place.first_chunk() + c) * kChunk;
            store_if(out + 2 * at, x, place.exists(line) && (!S::kRagged || at + 8 * place.word < left));
        }
    }
}

// Codes in bytes, or packed.
template <class S, class Codes>
__device__ __forceinline__ void write_codes(const Values<S>& values, const Problem& p, const Place<S>& place,
                                            const Codes& codes) {
    constexpr int kBytesPerTwo = S::kOutput == kInt4 ? 1 : 2, kOwn = S::kOutput == kInt4 ? 4 : 8;
    char* out = static_cast<char*>(p.codes.codes) + place.row * (S::kElements / 2 * kBytesPerTwo) + kOwn * place.word;
#pragma unroll
    for (int k = 0; k < S::kFinalLines; ++k) {
        const int line = place.line(k);
        char* to = out + line * (S::kWidth / 2 * kBytesPerTwo) + place.first_chunk() * (kChunk / 2 * kBytesPerTwo);
        const bool valid = place.exists(line);
#pragma unroll
        for (int c = 0; c < S::kFinalChunks; ++c) {
            if constexpr (S::kOutput == kInt4) {
                store_if(to + c * (kChunk / 2), codes.packed(values[k][c]), valid);
            } else {
                store_if(to + c * kChunk, codes.held(values[k][c]), valid);
            }
        }
    }
}

template <class S>
__device__ __forceinline__ void widen(Values<S>& values, const HalfValues<S>& halves) {
#pragma unroll
    for (int i = 0; i < S::kFinalLines * S::kFinalChunks * 4; ++i) {
        const float2 pair = Float16<__half>::unpack((&halves[0][0][0])[i]);
        (&values[0][0][0])[2 * i] = pair.x, (&values[0][0][0])[2 * i + 1] = pair.y;
    }
}

template <class S>
__device__ __forceinline__ float largest_of(const Values<S>& values) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kFinalLines * S::kFinalChunks * 8; ++i) largest = fmaxf(largest, fabsf((&values[0][0][0])[i]));
    return largest;
}

template <class S>
using Right = std::conditional_t<S::kHalf, HalfRightFactor<S::kColumnOrder>, RightFactor<S::kColumns, S::kColumnOrder>>;

// Each group of Warps warps takes one row after another. Dynamic shared memory: a ring of rows for each group, then, with
// an exchange, the row as float32, or half of it with two passes.
template <class Type, int Order, int Warps, int Strips, int Slots, int Passes, bool Columns, Output Result, bool Gated,
          bool Half, int MinBlocks>
__global__ void __launch_bounds__(Warps == 1 ? 128 : 32 * Warps, MinBlocks) hadamard_strips(const Problem p) {
    using S = Shape<Type, Order, Warps, Strips, Slots, Passes, Columns, Result, Gated, Half>;
    extern __shared__ float4 shared[];
    alignas(16) __shared__ float scratch[32];
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
    const Right<S> right(lane / 4, lane % 4);
    const CodeRange<Result == kInt4 ? 4 : 8> range(p.codes, Half ? 1.0f : p.norm);

    const Rows units = rows_of_block(p.share, p.rows);
    const int offset = lane / 8 * 2 * S::kWidth + warp * Strips * kChunk + lane % 8 * 8;
    const auto fetch = [&](int slot, int unit) {
        const long long row = (long long)unit * S::kRowsPerBlock + group, start = row * S::kElements;
        int bytes = unit < units.end && start < p.elements ? S::kSlotBytes : 0;
        if (S::kRagged && bytes) bytes = (int)min((long long)bytes, 2 * (p.elements - start));
        ring.fetch(slot, static_cast<const char*>(p.x) + row * S::kSlotBytes, bytes);
    };
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) fetch(slot, units.first + slot * units.step);

    int use = 0;
    for (int unit = units.first; unit < units.end; unit += units.step, ++use) {
        const long long row = (long long)unit * S::kRowsPerBlock + group;
        if (row * S::kElements >= p.elements) break;  // a group beyond the last row
        const int slot = use % Slots;
        ring.wait(slot, use);
        const char* from = ring.at(slot) + 2 * offset;
        const int available = S::kRagged ? (int)min((long long)S::kElements, p.elements - row * S::kElements) : 0;
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
        fetch(slot, unit + Slots * units.step);
        const Place<S> place(row, warp, lane);
        Values<S> values;
        float largest = 0.0f;
        if constexpr (Half) {
            HalfSums<S> halves;
            transform_halves<S>(halves, sums, right, 8.0f * p.norm);
            HalfValues<S> rounded;
            collect_halves<S>(rounded, halves, reinterpret_cast<uint4*>(exchanged), warp, lane);
            if constexpr (Result == kSame) {
                const auto vector = [&](int k, int c) {
                    const u32(&v)[4] = rounded[k][c];
                    return uint4{v[0], v[1], v[2], v[3]};
                };
                write_vectors<S>(vector, p, place, lane);
                continue;
            }
            widen<S>(values, rounded);
        } else {
#pragma unroll
            for (int s = 0; s < Strips; ++s)
#pragma unroll
                for (int h = 0; h < S::kHalves; ++h) right.apply(sums[s][h / 2], h % 2);
            if constexpr (Columns) add_columns<S>(sums, p.norm, largest);
            collect<S>(values, sums, exchanged, warp, lane);
            if constexpr (Columns) add_chunks<S>(values, p.norm, largest);
        }
        if constexpr (Result == kSame) {
            const float factor = S::kNormInChunks || S::kNormInColumns ? 1.0f : p.norm;
            const auto vector = [&](int k, int c) {
                using F = Float16<Type>;
                const float(&v)[8] = values[k][c];
                return uint4{F::pack(v[0] * factor, v[1] * factor), F::pack(v[2] * factor, v[3] * factor),
                             F::pack(v[4] * factor, v[5] * factor), F::pack(v[6] * factor, v[7] * factor)};
            };
            write_vectors<S>(vector, p, place, lane);
        } else {
            if constexpr (!S::kLargestInChunks && !S::kLargestInColumns) largest = largest_of<S>(values);
            const float scale = range.scale(block_largest<Warps>(largest, scratch));
            if (warp == 0 && lane == 0 && (row == 0 || !range.is_static)) p.codes.scale[row] = scale;
            write_codes<S>(values, p, place, range.codes(scale));
        }
    }
}

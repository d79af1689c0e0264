// How hadamard_strips.cu cuts up a row, and what threads hold of it from load to store. sm_80 and newer.
#pragma once

#include "hadamard/tile.cuh"
#include "epilogue/floats.cuh"
#include "pipeline/row_kind.cuh"
#include "pipeline/row_ring.cuh"
#include "pipeline/row_share.cuh"

#include <cuda/std/type_traits>

// What one launch computes.
struct Problem {
    const void* x;       // [rows, n], or [rows, 2n] = (gate | up) with kGated
    void* y;             // [rows, n] in the type of x; unused with quantization
    const u32* signs;    // [tiles, ceil(tiles / 4), 32]: bit set where an entry of the left factor is -1
    Codes codes;
    long long elements;  // rows * n, of the output
    Share share;         // of units of a row for each of the block's groups of warps
    int rows;            // units
    int blocks_of;       // the left factor is block-diagonal with blocks of so many rows
    float norm;          // 1 / sqrt(size of the transform)
    RowNorm row_norm;
};

// How a row is cut up; every member is known to the compiler.
template <class Type, int RowOrder, int RowWarps, int WarpStrips, int RingSlots, int ExchangePasses,
          bool TransformColumns, Output Result, Kind What, bool IsHalf>
struct Shape {
    using T = Type;
    static constexpr int kOrder = RowOrder, kWarps = RowWarps, kStrips = WarpStrips;
    static constexpr bool kColumns = TransformColumns, kGated = What == Kind::kGated, kNormed = What == kNorm, kHalf = IsHalf;
    static_assert(!kHalf || (kColumns && cuda::std::is_same_v<Type, __half>));  // mixing heads rounds once as it is
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
    static constexpr int kExchangedBytes = kExchange ? 16 * 32 * kLines * kChunks * (kHalf ? 1 : kQuads) : 0;
    static constexpr int kSharedBytes = kRowsPerBlock * Ring::kBytes + kExchangedBytes;
    // What a thread holds in the end: some of its rows in all chunks, or all of its rows in its own strips.
    static constexpr int kFinalLines = kExchange ? (kLines + kWarps - 1) / kWarps : kLines;
    static constexpr int kFinalChunks = kExchange ? kChunks : kStrips;
    // The norm is part of the last additions, unless codes follow, which take it into their scale, or of the rounding
    // to float16 where that is the arithmetic.
    static constexpr bool kNormInChunks = kColumns && kOutput == kSame && kFinalChunks > 1 && !kHalf;
    static constexpr bool kNormInColumns = kColumns && kOutput == kSame && kFinalChunks == 1 && !kHalf;
    // Where the last additions see the row's largest magnitude.
    static constexpr bool kLargestInChunks = kColumns && kOutput != kSame && kFinalChunks > 1 && !kHalf;
    static constexpr bool kLargestInColumns = kColumns && kOutput != kSame && kFinalChunks == 1 && !kHalf;
};

// Sixteen bytes of rows 2t, 2t + 1, 2t + 8, 2t + 9 of each tile, columns 8g.. of a strip. In memory order lane l holds
// those of t = l / 8, g = l % 8, so that eight lanes share a line; a product wants l = 4g + t.
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

template <class S>
using Right = cuda::std::conditional_t<S::kHalf, HalfRightFactor<S::kColumnOrder>,
                                       RightFactor<S::kColumns, S::kColumnOrder>>;

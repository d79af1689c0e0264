// Hadamard transform of 16-bit rows whose left factor is large, optionally followed by quantization (QuaRot Sec. 4).
//
// A row of n values is a matrix [Order, 64 * Chunks] in row-major order, and H_n = H_Order (x) H_(64 * Chunks). The
// block turns the row into right operands of matrix instructions in shared memory, once; every warp multiplies all of
// them by its tiles of the left factor. Products with +-1 are exact and sums float32; the right factor then acts
// between registers (hadamard/tile.cuh). While one row is worked on, the next arrives.
// Architectures: sm_80 and newer.
#include "hadamard/tile.cuh"
#include "epilogue/floats.cuh"
#include "values/reduce.cuh"
#include "pipeline/row_kind.cuh"
#include "pipeline/row_ring.cuh"
#include "pipeline/row_share.cuh"

#include <cuda/std/type_traits>

// What one launch computes.
struct Problem {
    const void* x;     // [rows, n], or [rows, 2n] = (gate | up) with kGated
    void* y;           // [rows, n] in the type of x; unused with quantization
    const u32* signs;  // [tiles of all warps, ceil(tiles / 4), 32]: bit set where an entry of the left factor is -1
    Codes codes;
    Share share;
    int rows;
    float norm;        // 1 / sqrt(size of the transform)
    RowNorm row_norm;
};

// How a row is cut up; every member is known to the compiler.
template <class Type, int RowOrder, int RowChunks, int WarpTiles, bool TransformColumns, Output Result, Kind What,
          bool IsHalf>
struct Shape {
    using T = Type;
    static constexpr int kOrder = RowOrder, kChunks = RowChunks, kTiles = WarpTiles;
    static constexpr bool kColumns = TransformColumns, kGated = What == Kind::kGated, kNormed = What == kNorm, kHalf = IsHalf;
    static_assert(!kHalf || (kColumns && cuda::std::is_same_v<Type, __half>));  // mixing heads rounds once as it is
    static constexpr ColumnOrder kColumnOrder = Result == kInt4 ? kPacked : kConsecutive;
    static constexpr Output kOutput = Result;
    static constexpr int kSteps = (kOrder + kTile - 1) / kTile, kSignWords = (kSteps + 3) / 4;
    static constexpr int kWarps = (kSteps + kTiles - 1) / kTiles;
    static constexpr int kWidth = kChunk * kChunks, kElements = kOrder * kWidth;
    static constexpr int kPieces = kWidth / 8;  // of 16 bytes, in a row of the matrix
    static constexpr int kHalfBytes = 2 * kElements, kInputBytes = kHalfBytes * (kGated ? 2 : 1);
    static constexpr int kOperands = kSteps * kChunks * 4 * 32;  // of 16 bytes
    using Ring = RowRing<Group<true>, 1, kInputBytes>;
    static constexpr int kSharedBytes = Ring::kBytes + 2 * 16 * kOperands;
};

template <class S>
using Sums = float[S::kTiles][S::kChunks][8][4];

template <class S>
using Right = cuda::std::conditional_t<S::kHalf, HalfRightFactor<S::kColumnOrder>,
                                       RightFactor<S::kColumns, S::kColumnOrder>>;

// Where lane 4g + t finds its operands among 32: neither writing lanes (one t, all g) nor reading ones (all t, two g)
// meet in a bank.
__device__ __forceinline__ int operand_slot(int g, int t) { return 8 * t + (g ^ 2 * t); }

// A row that has arrived; with kNorm also 1 / its root mean square, and what else the norm takes.
struct Arrived {
    const char* row;
    float factor;
    const RowNorm& norm;
};

// The block finds what it has to know of all values before it turns them into operands.
template <class S>
__device__ __forceinline__ Arrived arrived(const char* row, const RowNorm& norm) {
    if constexpr (S::kNormed) {
        alignas(16) __shared__ float scratch[S::kWarps];
        float squares = 0.0f;
        for (int i = threadIdx.x; i < S::kElements / 8; i += 32 * S::kWarps)
            squares = add_squares<typename S::T>(*reinterpret_cast<const uint4*>(row + 16 * i), squares);
        return {row, norm_factor(norm, block_total<S::kWarps>(squares, scratch), S::kElements), norm};
    } else {
        return {row, 1.0f, norm};
    }
}

template <class S>
__device__ __forceinline__ uint4 load_piece(const Arrived& x_row, int line, int piece) {
    if (line >= S::kOrder) return {0, 0, 0, 0};
    using T = typename S::T;
    const int at = line * S::kPieces + piece;
    const char* from = x_row.row + 16 * at;
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    if constexpr (S::kNormed) return normed<T>(x, x_row.factor, x_row.norm, 8 * at);
    if constexpr (!S::kGated) return x;
    const uint4 up = *reinterpret_cast<const uint4*>(from + S::kHalfBytes);
    return {gated_pair<T>(x.x, up.x), gated_pair<T>(x.y, up.y), gated_pair<T>(x.z, up.z), gated_pair<T>(x.w, up.w)};
}

// Right operands of two products, columns 2v and 2v + 1 of eight: of each the words for the lower and the upper half of
// k. Word `v` of a piece holds these two columns of one matrix row; rows come as (2t, 2t + 1, 2t + 8, 2t + 9).
__device__ __forceinline__ uint4 right_operands(u32 row0, u32 row1, u32 row8, u32 row9) {
    return {__byte_perm(row0, row1, 0x5410), __byte_perm(row8, row9, 0x5410), __byte_perm(row0, row1, 0x7632),
            __byte_perm(row8, row9, 0x7632)};
}

// Operands of the whole row: [step of k][chunk][two of eight columns][slot] of 16 bytes.
template <class S>
__device__ __forceinline__ void make_operands(uint4* operands, const Arrived& row) {
    constexpr int kItems = S::kSteps * S::kPieces * 4, kThreads = 32 * S::kWarps;
#pragma unroll 2
    for (int i = threadIdx.x; i < kItems; i += kThreads) {
        const int g = i % 8, chunk = i / 8 % S::kChunks, t = i / S::kPieces % 4, step = i / (S::kPieces * 4);
        const int line = kTile * step + 2 * t, piece = 8 * chunk + g;
        const uint4 a = load_piece<S>(row, line, piece), b = load_piece<S>(row, line + 1, piece);
        const uint4 c = load_piece<S>(row, line + 8, piece), d = load_piece<S>(row, line + 9, piece);
        uint4* out = operands + (step * S::kChunks + chunk) * 128 + operand_slot(g, t);
        out[0] = right_operands(a.x, b.x, c.x, d.x);
        out[32] = right_operands(a.y, b.y, c.y, d.y);
        out[64] = right_operands(a.z, b.z, c.z, d.z);
        out[96] = right_operands(a.w, b.w, c.w, d.w);
    }
}

// sums = this warp's tiles of the left factor times the row.
template <class S>
__device__ __forceinline__ void multiply_left(Sums<S>& sums, const uint4* operands,
                                              const u32 (&signs)[S::kTiles][S::kSignWords], const Signs& ones,
                                              int lane) {
#pragma unroll
    for (int i = 0; i < S::kTiles * S::kChunks * 32; ++i) (&sums[0][0][0][0])[i] = 0.0f;
    operands += operand_slot(lane / 4, lane % 4);
    u32 words[S::kTiles];
#pragma unroll
    for (int k = 0; k < S::kSteps; ++k) {
        Signs a[S::kTiles];
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m) {
            if (k % 4 == 0) words[m] = recomputed(signs[m][k / 4]);  // left operands would fill the registers
            a[m] = left_operand(words[m], k % 4, ones);
        }
#pragma unroll
        for (int c = 0; c < S::kChunks; ++c) {
            const uint4* b = operands + (k * S::kChunks + c) * 128;
            const uint4 pairs[4] = {b[0], b[32], b[64], b[96]};
#pragma unroll
            for (int m = 0; m < S::kTiles; ++m)
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    ptx::mma_m16n8k16<typename S::T>(sums[m][c][2 * v], a[m].r, pairs[v].x, pairs[v].y);
                    ptx::mma_m16n8k16<typename S::T>(sums[m][c][2 * v + 1], a[m].r, pairs[v].z, pairs[v].w);
                }
        }
    }
}

// The right factor of one tile: across lanes and bit 2 of i on tensor cores, then the bits of the chunk, then bits 0
// and 1 of i, with the norm or, where codes follow, the largest magnitude. Without a right factor the change of layout.
template <class S>
__device__ __forceinline__ void multiply_right(float (&tile)[S::kChunks][8][4], const Right<S>& right, float norm,
                                               float& largest) {
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) right.apply(tile[c], 0), right.apply(tile[c], 1);
    if constexpr (!S::kColumns) {
#pragma unroll
        for (int i = 0; i < S::kChunks * 32; ++i) {
            float& x = (&tile[0][0][0])[i];
            if (S::kOutput == kSame)
                x *= norm;
            else
                largest = fmaxf(largest, fabsf(x));
        }
        return;
    }
#pragma unroll
    for (int bit = 1; bit < S::kChunks; bit *= 2)
#pragma unroll
        for (int i = 0; i < S::kChunks * 32; ++i)
            if (!(i / 32 & bit)) butterfly((&tile[0][0][0])[i], (&tile[0][0][0])[i + 32 * bit]);
#pragma unroll
    for (int i = 0; i < S::kChunks * 32; ++i)
        if (!(i & 4)) butterfly((&tile[0][0][0])[i], (&tile[0][0][0])[i + 4]);
#pragma unroll
    for (int i = 0; i < S::kChunks * 32; ++i) {
        if (i & 8) continue;
        float &a = (&tile[0][0][0])[i], &b = (&tile[0][0][0])[i + 8];
        if (S::kOutput == kSame)
            scaled_butterfly(a, b, norm);
        else
            butterfly(a, b, largest);
    }
}

// The same in float16 arithmetic, the result widened again.
template <class S>
__device__ __forceinline__ void multiply_right_half(float (&tile)[S::kChunks][8][4], const Right<S>& right, float norm,
                                                    float& largest) {
    u32 halves[S::kChunks][2][8];
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                halves[c][h][i] =
                    Float16<__half>::pack(tile[c][i][2 * h] * (8.0f * norm), tile[c][i][2 * h + 1] * (8.0f * norm));
            right.apply(halves[c][h]);
        }
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < S::kChunks * 16; ++i)
            if (!(i & bit)) butterfly((&halves[0][0][0])[i], (&halves[0][0][0])[i | bit]);
#pragma unroll
    for (int bit = 1; bit < S::kChunks; bit *= 2)
#pragma unroll
        for (int i = 0; i < S::kChunks * 16; ++i)
            if (!(i / 16 & bit)) butterfly((&halves[0][0][0])[i], (&halves[0][0][0])[i + 16 * bit]);
#pragma unroll
    for (int i = 0; i < S::kChunks * 16; ++i) {
        const float2 pair = Float16<__half>::unpack((&halves[0][0][0])[i]);
        float(&to)[4] = tile[i / 16][i % 8];
        to[2 * (i / 8 % 2)] = pair.x, to[2 * (i / 8 % 2) + 1] = pair.y;
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
}

// `codes`: what turns values into codes, with groups what finds their scales.
template <class S, class Codes>
__device__ __forceinline__ void write_sums(const Sums<S>& sums, const Problem& p, int row, int first_tile, int lane,
                                           const Codes* codes) {
    using F = Float16<typename S::T>;
    // Bytes of two values, and of what a thread writes at once; 16-byte pieces go out in memory order.
    constexpr int kTwo = kBytesOfTwo<S::kOutput>, kOwn = 4 * kTwo;
    const int group = S::kOutput == kSame ? lane / 8 : lane % 4, word = S::kOutput == kSame ? lane % 8 : lane / 4;
    const int first_line = kTile * first_tile + 2 * group;
    char* out = static_cast<char*>(S::kOutput == kSame ? p.y : p.codes.codes) +
                ((long long)row * S::kElements + first_line * S::kWidth) / 2 * kTwo + kOwn * word;
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int line = kTile * m + 8 * (j / 2) + j % 2;
            const bool valid = first_line + line < S::kOrder;
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c) {
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = sums[m][c][i][j];
                char* to = out + (line * S::kChunks + c) * (kChunk / 2 * kTwo);
                if constexpr (S::kOutput == kSame) {
                    const uint4 x = {F::pack(v[0], v[1]), F::pack(v[2], v[3]), F::pack(v[4], v[5]),
                                     F::pack(v[6], v[7])};
                    ptx::store_if(to, in_memory_order(x, lane), valid);
                } else if constexpr (kInGroups<S::kOutput>) {
                    constexpr int kSize = Codes::kSize, kLanes = kSize / 8;
                    char* scales = reinterpret_cast<char*>(p.codes.scale) + row * (long long)(S::kElements / kSize) +
                                   static_cast<unsigned>(word) / kLanes + (first_line + line) * (S::kWidth / kSize) +
                                   c * (kChunk / kSize);
                    write_group<4>(*codes, v, to, scales, word % kLanes == 0, valid);
                } else if constexpr (S::kOutput == kInt4) {
                    ptx::store_if(to, codes->packed(v), valid);
                } else {
                    ptx::store_if(to, codes->held(v), valid);
                }
            }
        }
}

// A block takes one row after another. Columns: apply the right factor (else heads are mixed). Dynamic shared memory:
// the row that arrives, then the operands of two rows, so that one barrier to a row suffices.
template <class Type, int Order, int Chunks, int Tiles, bool Columns, Output Result, Kind What, bool Half,
          int MinBlocks>
__global__ void
__launch_bounds__(32 * Shape<Type, Order, Chunks, Tiles, Columns, Result, What, Half>::kWarps, MinBlocks)
    hadamard_dense(const Problem p) {
    ptx::follow_previous_launch();
    using S = Shape<Type, Order, Chunks, Tiles, Columns, Result, What, Half>;
    extern __shared__ uint4 shared[];
    alignas(16) __shared__ float scratch[32];
    const int lane = threadIdx.x % 32, first_tile = threadIdx.x / 32 * Tiles;
    const typename S::Ring ring{reinterpret_cast<char*>(shared)};
    uint4* const operands = shared + S::Ring::kBytes / 16;
    ring.start();
    __syncthreads();

    u32 signs[Tiles][S::kSignWords];
#pragma unroll
    for (int i = 0; i < Tiles * S::kSignWords; ++i)
        (&signs[0][0])[i] = __ldg(p.signs + (first_tile * S::kSignWords + i) * 32 + lane);
    const Signs ones = block_ones<Type>(S::kSteps * kTile, lane / 4, lane % 4);
    const Right<S> right(lane / 4, lane % 4);
    const RangeOf<Result> range(p.codes, Half ? 1.0f : p.norm);

    const Rows rows = rows_of_block(p.share, p.rows);
    const auto fetch = [&](int row) {
        const char* from = static_cast<const char*>(p.x) + (long long)row * S::kInputBytes;
        ring.fetch(0, from, row < rows.end ? S::kInputBytes : 0);
    };
    fetch(rows.first);
    ring.wait(0, 0);
    make_operands<S>(operands, arrived<S>(ring.at(0), p.row_norm));
    int use = 0;
    for (int row = rows.first; row < rows.end; row += rows.step) {
        __syncthreads();  // this row's operands are complete, and the ring's row and the operands before have been read
        fetch(row + rows.step);
        Sums<S> sums;
        multiply_left<S>(sums, operands + use % 2 * S::kOperands, signs, ones, lane);
        float largest = 0.0f;
#pragma unroll
        for (int m = 0; m < Tiles; ++m) {
            if constexpr (Half)
                multiply_right_half<S>(sums[m], right, p.norm, largest);
            else
                multiply_right<S>(sums[m], right, p.norm, largest);
        }
        if constexpr (Result == kSame) {
            write_sums<S, ScaledCodes<8>>(sums, p, row, first_tile, lane, nullptr);
        } else if constexpr (kInGroups<Result>) {
            write_sums<S>(sums, p, row, first_tile, lane, &range);
        } else {
            const float scale = range.scale(block_largest<S::kWarps>(largest, scratch));
            if (threadIdx.x == 0 && (row == 0 || !range.is_static)) p.codes.scale[row] = scale;
            const auto codes = range.codes(scale);
            write_sums<S>(sums, p, row, first_tile, lane, &codes);
        }
        ++use;
        if (row + rows.step < rows.end) {
            ring.wait(0, use);
            make_operands<S>(operands + use % 2 * S::kOperands, arrived<S>(ring.at(0), p.row_norm));
        }
    }
}

// Hadamard transform of 16-bit rows whose left factor is large, optionally followed by quantization (QuaRot Sec. 4).
//
// A row of n values is a matrix [Order, 64 * Chunks] in row-major order, and H_n = H_Order (x) H_(64 * Chunks). The block
// turns the row into right operands of matrix instructions in shared memory, once; every warp multiplies all of them by its
// tiles of the left factor. Products with +-1 are exact and sums float32; the right factor then acts between registers
// (hadamard_tile.cuh). While one row is worked on, the next arrives.
// Architectures: sm_80 and newer.
#include "hadamard_tile.cuh"
#include "quantize.cuh"
#include "reduce.cuh"
#include "row_ring.cuh"

using u32 = unsigned int;

// What one launch computes.
struct Problem {
    const void* x;     // [rows, n], or [rows, 2n] = (gate | up) with Gated
    void* y;           // [rows, n] in the type of x; unused with quantization
    const u32* signs;  // [tiles of all warps, ceil(tiles / 4), 32]: bit set where an entry of the left factor is -1
    Codes codes;
    int rows;
    float norm;        // 1 / sqrt(size of the transform)
};

// How a row is cut up; every member is known to the compiler.
template <class Type, int RowOrder, int RowChunks, int WarpTiles, bool TransformColumns, Output Result, bool IsGated>
struct Shape {
    using T = Type;
    static constexpr int kOrder = RowOrder, kChunks = RowChunks, kTiles = WarpTiles;
    static constexpr bool kColumns = TransformColumns, kGated = IsGated;
    static constexpr Output kOutput = Result;
    static constexpr int kSteps = (kOrder + kTile - 1) / kTile, kSignWords = (kSteps + 3) / 4;
    static constexpr int kWarps = (kSteps + kTiles - 1) / kTiles;
    static constexpr int kWidth = kChunk * kChunks, kElements = kOrder * kWidth;
    static constexpr int kPieces = kWidth / 8;  // of 16 bytes, in a row of the matrix
    static constexpr int kHalfBytes = 2 * kElements, kInputBytes = kHalfBytes * (kGated ? 2 : 1);
    static constexpr int kOperands = kSteps * kChunks * 4 * 32;  // of 16 bytes
    using Ring = RowRing<Group<true>, 1, kInputBytes>;
};

template <class S>
using Sums = float[S::kTiles][S::kChunks][8][4];

// Where lane 4g + t finds its operands among 32: neither writing lanes (one t, all g) nor reading ones (all t, two g) meet
// in a bank.
__device__ __forceinline__ int operand_slot(int g, int t) { return 8 * t + (g ^ 2 * t); }

template <class S>
__device__ __forceinline__ uint4 load_piece(const char* row, int line, int piece) {
    if (line >= S::kOrder) return {0, 0, 0, 0};
    const char* from = row + 16 * (line * S::kPieces + piece);
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    if constexpr (!S::kGated) return x;
    const uint4 up = *reinterpret_cast<const uint4*>(from + S::kHalfBytes);
    using T = typename S::T;
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
__device__ __forceinline__ void make_operands(uint4* operands, const char* row) {
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
                                              const u32 (&signs)[S::kTiles][S::kSignWords], const Signs& ones, int lane) {
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
                    mma_16n8k16<typename S::T>(sums[m][c][2 * v], a[m], pairs[v].x, pairs[v].y);
                    mma_16n8k16<typename S::T>(sums[m][c][2 * v + 1], a[m], pairs[v].z, pairs[v].w);
                }
        }
    }
}

// The right factor of one tile, with the norm: across lanes and bit 2 of i on tensor cores, then the bits of the chunk, then
// bits 0 and 1 of i. Without a right factor the change of layout and the norm.
template <class S>
__device__ __forceinline__ void multiply_right(float (&tile)[S::kChunks][8][4], const RightFactor<S::kColumns>& right,
                                               float norm) {
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) right.apply(tile[c], 0), right.apply(tile[c], 1);
    if constexpr (!S::kColumns) {
#pragma unroll
        for (int i = 0; i < S::kChunks * 32; ++i) (&tile[0][0][0])[i] *= norm;
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
    for (int i = 0; i < S::kChunks * 32; ++i)
        if (!(i & 8)) scaled_butterfly((&tile[0][0][0])[i], (&tile[0][0][0])[i + 8], norm);
}

// The row's scale by its largest magnitude, or the static one; written by the row's first thread.
template <class S>
__device__ __forceinline__ float choose_scale(const Sums<S>& sums, const Problem& p, int row, float* scratch) {
    float scale;
    if (p.codes.static_scale) {
        scale = *p.codes.static_scale;
    } else {
        float maximum = 0.0f;
#pragma unroll
        for (int i = 0; i < S::kTiles * S::kChunks * 32; ++i) maximum = fmaxf(maximum, fabsf((&sums[0][0][0][0])[i]));
        scale = dynamic_scale(reduce_warps<Maximum>(maximum, scratch, 0, S::kWarps), p.codes);
    }
    if (threadIdx.x == 0 && (row == 0 || !p.codes.static_scale)) p.codes.scale[row] = scale;
    return scale;
}

template <class S>
__device__ __forceinline__ void write_sums(const Sums<S>& sums, const Problem& p, int row, int first_tile, int lane,
                                           float factor) {
    using F = Float16<typename S::T>;
    const long long start = (long long)row * S::kElements + lane % 8 * 8;
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int line = kTile * (first_tile + m) + 8 * (j / 2) + lane / 8 * 2 + j % 2;
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c) {
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = sums[m][c][i][j];
                const long long at = start + (line * S::kChunks + c) * kChunk;
                const bool valid = line < S::kOrder;
                if constexpr (S::kOutput == kSame) {
                    const uint4 out = in_memory_order(
                        uint4{F::pack(v[0], v[1]), F::pack(v[2], v[3]), F::pack(v[4], v[5]), F::pack(v[6], v[7])}, lane);
                    if (valid) __stcs(reinterpret_cast<uint4*>(static_cast<typename S::T*>(p.y) + at), out);
                } else {
                    const uint2 codes = in_memory_order(codes_of(v, factor, p.codes.largest), lane);
                    write_codes<S::kOutput>(p.codes, at, codes, 2, valid);
                }
            }
        }
}

// A block takes one row after another. Columns: apply the right factor (else heads are mixed). Dynamic shared memory: the
// row that arrives, then the operands of two rows, so that one barrier to a row suffices.
template <class Type, int Order, int Chunks, int Tiles, bool Columns, Output Result, bool Gated, int MinBlocks>
__global__ void __launch_bounds__(32 * Shape<Type, Order, Chunks, Tiles, Columns, Result, Gated>::kWarps, MinBlocks)
    hadamard_dense(const Problem p) {
    using S = Shape<Type, Order, Chunks, Tiles, Columns, Result, Gated>;
    extern __shared__ uint4 shared[];
    __shared__ float scratch[32];
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
    const RightFactor<Columns> right(lane / 4, lane % 4);

    const int step = gridDim.x;
    const auto fetch = [&](int row) {
        ring.fetch(0, static_cast<const char*>(p.x) + (long long)row * S::kInputBytes, row < p.rows ? S::kInputBytes : 0);
    };
    fetch(blockIdx.x);
    ring.wait(0, 0);
    make_operands<S>(operands, ring.at(0));
    int use = 0;
    for (int row = blockIdx.x; row < p.rows; row += step) {
        __syncthreads();  // this row's operands are complete, and the ring's row and the operands before have been read
        fetch(row + step);
        Sums<S> sums;
        multiply_left<S>(sums, operands + use % 2 * S::kOperands, signs, ones, lane);
#pragma unroll
        for (int m = 0; m < Tiles; ++m) multiply_right<S>(sums[m], right, p.norm);
        float factor = 1.0f;
        if constexpr (Result != kSame) factor = __frcp_rn(choose_scale<S>(sums, p, row, scratch));
        write_sums<S>(sums, p, row, first_tile, lane, factor);
        ++use;
        if (row + step < p.rows) {
            ring.wait(0, use);
            make_operands<S>(operands + use % 2 * S::kOperands, ring.at(0));
        }
    }
}

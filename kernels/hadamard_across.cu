// Hadamard transform of 16-bit rows whose left factor is large, by warpgroup products (QuaRot Sec. 4), optionally packed.
//
// A row of n values is a matrix [Order, 64 * Chunks], and arrives as it is, in the 128-byte swizzle: so it is the right
// operand of warpgroup instructions, read across. Signs are the left operand and stay in registers, 16 rows of the left
// factor to a warp. Products with +-1 are exact and sums float32; the right factor then acts between registers.
// Architecture: sm_90a.
#include "hadamard_tile.cuh"
#include "quantize.cuh"
#include "reduce.cuh"
#include "row_share.cuh"
#include "wgmma_half.cuh"

using u32 = unsigned int;

// What one launch computes.
struct Problem {
    const void* x;     // [rows, n]
    void* y;           // [rows, n] in the type of x; unused with quantization
    const u32* signs;  // [tiles of all warps, ceil(tiles / 4), 32]: bit set where an entry of the left factor is -1
    Codes codes;
    Share share;
    int rows;
    float norm;        // 1 / sqrt(n)
};

template <class Type, int RowOrder, int RowChunks, int RingSlots, Output Result>
struct Shape {
    using T = Type;
    static constexpr int kOrder = RowOrder, kChunks = RowChunks, kSlots = RingSlots;
    static constexpr Output kOutput = Result;
    static constexpr int kSteps = (kOrder + kTile - 1) / kTile, kSignWords = (kSteps + 3) / 4;
    static constexpr int kGroups = (kOrder + 63) / 64, kWarps = 4 * kGroups;
    static constexpr int kWidth = kChunk * kChunks, kElements = kOrder * kWidth;
    static constexpr int kChunkBytes = kSteps * kTile * 128, kSlotBytes = kChunks * kChunkBytes;
    static constexpr int kStaging = kOutput == kSame ? 2048 : 0;  // of a warp: a tile of 16-bit values
};

// The right factor over a column's bit 5 and its lowest three, which lanes hold as they come. Results: of codes lane group g
// holds bits 5, 2, 1 and `top` bit 0, else g the lowest three and `top` bit 5.
template <Output Out>
struct AcrossFactor {
    float even[4], odd[4];

    __device__ __forceinline__ AcrossFactor(int g, int t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int top = r % 2, out = Out != kSame ? g / 4 * 8 + g % 4 * 2 + top : 8 * top + g, in = 2 * t + r / 2;
            even[r] = __popc(out & in) & 1 ? -1.0f : 1.0f;
            odd[r] = __popc(out & (in + 8)) & 1 ? -1.0f : 1.0f;
        }
    }
};

// The 64 columns of one tile, element [j][2h + e] being row 8h + 2t + e of the tile afterwards, and the row's largest
// magnitude or the norm.
template <class S>
__device__ __forceinline__ void multiply_right(float (&tile)[8][4], const RightFactor<true>& right) {
    right.apply(tile, 0), right.apply(tile, 1);
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (!(i & 4)) butterfly((&tile[0][0])[i], (&tile[0][0])[i + 4]);
}

// Rows of 16-bit values by way of shared memory: `sums[j][2h + e]` is column 8j + g.
template <class S>
__device__ __forceinline__ void write_tile(const float (&tile)[8][4], char* staging, char* out, int first_line,
                                           int lane) {
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = Float16<typename S::T>::pack(tile[j + i][2 * h], tile[j + i][2 * h + 1]);
            const int line = 8 * h + lane % 8, piece = j + lane / 8;  // what this lane addresses: a row of matrix lane / 8
            store_across(staging + line * 128 + (piece ^ lane % 8) * 16, words);
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int line = 4 * i + lane / 8, piece = lane % 8;
        const uint4 x = *reinterpret_cast<const uint4*>(staging + line * 128 + (piece ^ line % 8) * 16);
        store_if(out + (long long)line * S::kWidth * 2 + piece * 16, x, first_line + line < S::kOrder);
    }
}

template <class S>
__device__ __forceinline__ void write_packed(const float (&tile)[8][4], char* out, int first_line, int lane,
                                             const ScaledCodes<4>& codes) {
    const int g = lane / 4, t = lane % 4, own = g % 2;
    out += g / 4 * 16 + own * 8 + g / 2 % 2 * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const auto byte = [&](int i) { return codes.shifted(tile[i][j]) + 16 * codes.shifted(tile[i + 2][j]); };
        const u32 mine = gather_bytes(byte(0), byte(4), byte(1), byte(5)) ^ codes.kFlip;
        const u32 theirs = __shfl_xor_sync(0xFFFFFFFFu, mine, 4);
        const int line = 8 * (j / 2) + 2 * t + j % 2;
        store_if(out + line * (S::kWidth / 2), __byte_perm(mine, theirs, own ? 0x3276 : 0x5410),
                 first_line + line < S::kOrder);
    }
}

// Codes in bytes: words of four columns as above, then those of bit 4 exchanged for those of bit 5, so that eight lanes write
// 32 consecutive bytes.
template <class S>
__device__ __forceinline__ void write_held(const float (&tile)[8][4], char* out, int first_line, int lane,
                                           const ScaledCodes<8>& codes) {
    const int g = lane / 4, t = lane % 4, own = g % 2, upper = g / 4;
    out += upper * 16 + own * 8 + g / 2 % 2 * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 words[2];
#pragma unroll
        for (int bit4 = 0; bit4 < 2; ++bit4) {
            const auto code = [&](int i) { return codes.shifted(tile[i + 2 * bit4][j]); };
            const u32 mine = gather_bytes(code(0), code(4), code(1), code(5)) ^ codes.kFlip;
            const u32 theirs = __shfl_xor_sync(0xFFFFFFFFu, mine, 4);
            words[bit4] = __byte_perm(mine, theirs, own ? 0x3276 : 0x5410);
        }
        const u32 kept = upper ? words[1] : words[0];
        const u32 received = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[0] : words[1], 16);
        const int line = 8 * (j / 2) + 2 * t + j % 2;
        const bool valid = first_line + line < S::kOrder;
        store_if(out + line * S::kWidth, upper ? received : kept, valid);
        store_if(out + line * S::kWidth + 32, upper ? kept : received, valid);
    }
}

// Blocks take one row after another. Dynamic shared memory: a ring of rows, 1024-byte aligned, barriers, then staging.
template <class Type, int Order, int Chunks, int Slots, Output Result, int MinBlocks>
__global__ void __launch_bounds__(32 * Shape<Type, Order, Chunks, Slots, Result>::kWarps, MinBlocks)
    hadamard_across(const Problem p, const __grid_constant__ ptx::TensorMap map) {
    using S = Shape<Type, Order, Chunks, Slots, Result>;
    extern __shared__ uint4 shared[];
    alignas(16) __shared__ float scratch[32];
    __shared__ unsigned long long barriers[Slots];
    char* const ring = reinterpret_cast<char*>(shared) + (1024 - ptx::shared_address(shared) % 1024) % 1024;
    // One for a warp, and known to be so.
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    char* const staging = ring + Slots * S::kSlotBytes + warp * S::kStaging;
    const Rows rows = rows_of_block(p.share, p.rows);
    const auto fetch = [&](int slot, int row) {
        if (threadIdx.x != 0 || row >= rows.end) return;
        const u32 barrier = ptx::shared_address(barriers + slot);
        ptx::mbarrier_arrive_expect(barrier, 2 * S::kElements);
#pragma unroll
        for (int c = 0; c < Chunks; ++c)
            ptx::tma_load_2d(ptx::shared_address(ring + slot * S::kSlotBytes + c * S::kChunkBytes), map, c * kChunk,
                             row * Order, barrier);
    };
    // Rows of the right operand that do not exist meet signs, and must be finite.
    for (int i = threadIdx.x; i < Slots * Chunks * (S::kSteps * kTile - Order) * 8; i += 32 * S::kWarps) {
        const int chunk = i / ((S::kSteps * kTile - Order) * 8), piece = i % ((S::kSteps * kTile - Order) * 8);
        *reinterpret_cast<uint4*>(ring + chunk * S::kChunkBytes + Order * 128 + piece * 16) = {0, 0, 0, 0};
    }
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Slots; ++slot) ptx::mbarrier_init(ptx::shared_address(barriers + slot), 1);
        ptx::mbarrier_init_fence();
    }
    ptx::fence_async_shared();
    __syncthreads();
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) fetch(slot, rows.first + slot * rows.step);

    const Signs ones = block_ones<Type>(S::kSteps * kTile, lane / 4, lane % 4);
    Signs left[S::kSteps];
#pragma unroll
    for (int k = 0; k < S::kSteps; ++k)
        left[k] = left_operand(__ldg(p.signs + (warp * S::kSignWords + k / 4) * 32 + lane), k % 4, ones);
    RightFactor<true> right(lane / 4, lane % 4);
    const AcrossFactor<Result> across(lane / 4, lane % 4);
#pragma unroll
    for (int r = 0; r < 4; ++r) right.even[r] = across.even[r], right.odd[r] = across.odd[r];
    const CodeRange<Result == kInt8 ? 8 : 4> range(p.codes, p.norm);

    const int first_line = kTile * warp;
    using Sums = float[Chunks][8][4];
    const auto issue = [&](Sums& sums, int use) {
        const int slot = use % Slots;
        ptx::mbarrier_wait(ptx::shared_address(barriers + slot), use / Slots & 1);
        const auto operand = ptx::across_descriptor(ptx::shared_address(ring + slot * S::kSlotBytes));
        ptx::wgmma_fence();
#pragma unroll
        for (int c = 0; c < Chunks; ++c)
#pragma unroll
            for (int k = 0; k < S::kSteps; ++k)  // descriptors count 16 bytes
                ptx::wgmma_half<Type>(sums[c], left[k], operand + (c * S::kChunkBytes + k * kTile * 128) / 16, k > 0);
        ptx::wgmma_commit();
    };
    const auto finish = [&](Sums& sums, int use, int row) {
        ptx::wgmma_finish(sums);
        __syncthreads();  // all have read this slot
        fetch(use % Slots, row + Slots * rows.step);
    };
    const auto rest = [&](Sums& sums, int row) {
#pragma unroll
        for (int c = 0; c < Chunks; ++c) multiply_right<S>(sums[c], right);
#pragma unroll
        for (int bit = 1; bit < Chunks; bit *= 2)
#pragma unroll
            for (int i = 0; i < Chunks * 32; ++i)
                if (!(i / 32 & bit)) butterfly((&sums[0][0][0])[i], (&sums[0][0][0])[i + 32 * bit]);
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < Chunks * 32; ++i) {
            if (i & 8) continue;
            float &a = (&sums[0][0][0])[i], &b = (&sums[0][0][0])[i + 8];
            if (Result == kSame)
                scaled_butterfly(a, b, p.norm);
            else
                butterfly(a, b, largest);
        }
        if constexpr (Result == kSame) {
            char* out = static_cast<char*>(p.y) + 2 * ((long long)row * S::kElements + first_line * S::kWidth);
#pragma unroll
            for (int c = 0; c < Chunks; ++c)
                write_tile<S>(sums[c], staging, out + 2 * c * kChunk, first_line, lane);
        } else {
            const float scale = range.scale(block_largest<S::kWarps>(largest, scratch));
            if (threadIdx.x == 0 && (row == 0 || !range.is_static)) p.codes.scale[row] = scale;
            const auto codes = range.codes(scale);
            constexpr int kTwo = Result == kInt8 ? 2 : 1;  // bytes of two codes
            char* out = static_cast<char*>(p.codes.codes) + ((long long)row * S::kElements + first_line * S::kWidth) / 2 * kTwo;
#pragma unroll
            for (int c = 0; c < Chunks; ++c) {
                if constexpr (Result == kInt8)
                    write_held<S>(sums[c], out + c * kChunk, first_line, lane, codes);
                else
                    write_packed<S>(sums[c], out + c * (kChunk / 2), first_line, lane, codes);
            }
        }
    };
    int row = rows.first;
    if (row >= rows.end) return;
    Sums sums;
    issue(sums, 0), finish(sums, 0, row);
    for (int use = 1;; ++use) {
        rest(sums, row);
        if ((row += rows.step) >= rows.end) return;
        issue(sums, use), finish(sums, use, row);
    }
}

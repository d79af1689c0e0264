// Hadamard transform of 16-bit rows whose left factor is large, by warpgroup products (QuaRot Sec. 4), optionally
// packed.
//
// A row of n values is a matrix [Order, 64 * Chunks], and arrives as it is, in the 128-byte swizzle: so it is the right
// operand of warpgroup instructions, read across. Signs are the left operand and stay in registers, 16 rows of the left
// factor to a warp. Products with +-1 are exact and sums float32; the right factor then acts between registers.
// Warpgroups wait for one another only where codes need the largest magnitude of the row.
// Architecture: sm_90a.
#include "hadamard/tile.cuh"
#include "epilogue/floats.cuh"
#include "values/reduce.cuh"
#include "pipeline/row_kind.cuh"
#include "pipeline/row_share.cuh"
#include "mma/warpgroup_across.cuh"

// What one launch computes.
struct Problem {
    const void* x;     // [rows, n]
    void* y;           // [rows, n] in the type of x; unused with quantization
    const u32* signs;  // [tiles of all warps, ceil(tiles / 4), 32]: bit set where an entry of the left factor is -1
    Codes codes;
    Share share;
    int rows;
    float norm;        // 1 / sqrt(n)
    RowNorm row_norm;
};

template <class Type, int RowOrder, int RowChunks, int RingSlots, Output Result, Kind What>
struct Shape {
    using T = Type;
    static constexpr int kOrder = RowOrder, kChunks = RowChunks, kSlots = RingSlots;
    static constexpr Output kOutput = Result;
    static constexpr bool kNormed = What == kNorm;
    static_assert(What == kPlain || What == kNorm);
    static constexpr int kSteps = (kOrder + kTile - 1) / kTile, kSignWords = (kSteps + 3) / 4;
    static constexpr int kGroups = (kOrder + 63) / 64, kWarps = 4 * kGroups;
    static constexpr int kWidth = kChunk * kChunks, kElements = kOrder * kWidth;
    static constexpr int kChunkBytes = kSteps * kTile * 128, kSlotBytes = kChunks * kChunkBytes;
    static constexpr int kTwo = kBytesOfTwo<kOutput>;
    static constexpr int kStaging = kTile * kChunk / 2 * kTwo;  // of a warp: a tile of results
    static constexpr int kSharedBytes = 1024 + kSlots * kSlotBytes + kWarps * kStaging;  // the ring aligned to 1024
    // Slots are filled again when all warps have read them: at once where these go in step, else a row later.
    static constexpr int kDelay = kGroups > 1 ? 1 : 0;
    static_assert(kSlots > kDelay);
    // A lane that waits alone lets the others go on, and unless something holds them before the next product, that never
    // ends (kernels/notes/hadamard.md). Plain integers and values have such a place, where the compiler put it.
    static constexpr bool kWarpWaits = kNormed || kOutput == kFp8 || kInGroups<kOutput>;
};

template <class S>
using Sums = float[S::kChunks][8][4];

// The right factor over a column's lowest four bits, of which lanes hold three as they come. Of codes lane group g
// holds bits 1 to 3 of the results' columns and `top` bit 0; of 16-bit values g holds bits 0 to 2.
template <Output Out>
__device__ __forceinline__ RightFactor<true> across_factor(int g, int t) {
    RightFactor<true> right;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const int top = r % 2, out = Out == kSame ? 8 * top + g : 2 * g + top, in = 2 * t + r / 2;
        right.even[r] = __popc(out & in) & 1 ? -1.0f : 1.0f;
        right.odd[r] = __popc(out & (in + 8)) & 1 ? -1.0f : 1.0f;
    }
    return right;
}

// The columns of all chunks; element [c][j][2h + e] is row 8h + 2t + e of the tile afterwards. With the norm, or the
// row's largest magnitude.
template <class S>
__device__ __forceinline__ void multiply_right(Sums<S>& sums, const RightFactor<true>& right, float norm,
                                               float& largest) {
    constexpr int kEach = 32, kAll = S::kChunks * kEach;
    float* const x = &sums[0][0][0];
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c)
#pragma unroll
        for (int j = 0; j < 8; j += 2)
#pragma unroll
            for (int h = 0; h < 2; ++h) right.apply(sums[c][j], sums[c][j + 1], h);
#pragma unroll
    for (int i = 0; i < kAll; ++i)
        if (!(i & 8)) butterfly(x[i], x[i + 8]);
#pragma unroll
    for (int bit = kEach; bit < kAll; bit *= 2)
#pragma unroll
        for (int i = 0; i < kAll; ++i)
            if (!(i & bit)) butterfly(x[i], x[i + bit]);
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
        if (i & 16) continue;
        if (S::kOutput == kSame)
            scaled_butterfly(x[i], x[i + 16], norm);
        else
            butterfly(x[i], x[i + 16], largest);
    }
}

__device__ __forceinline__ uint4 even_bytes_first(const uint4& x) {
    return {__byte_perm(x.x, x.y, 0x6420), __byte_perm(x.z, x.w, 0x6420), __byte_perm(x.x, x.y, 0x7531),
            __byte_perm(x.z, x.w, 0x7531)};
}

// Pieces of 16 bytes of a tile of results on their way out, `kPieces` to a line, where neither eight lines of a piece
// nor eight neighbouring pieces meet in a bank.
template <class S>
struct Staging {
    static constexpr int kPieces = 4 * S::kTwo / 2;  // 8, 4 or 2
    char* tile;

    __device__ __forceinline__ char* at(int line, int piece) const {
        return tile + (line * kPieces + (piece ^ line * kPieces / 8 % kPieces)) * 16;
    }

    // What `store_across` left, to memory: `out` is the tile's first line there.
    __device__ __forceinline__ void flush(char* out, int first_line, int lane) const {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kTile * kPieces; i += 32) {
            const int line = (i + lane) / kPieces, piece = lane % kPieces;
            uint4 x = *reinterpret_cast<const uint4*>(at(line, piece));
            if constexpr (kInGroups<S::kOutput>) x = even_bytes_first(x);
            ptx::store_if(out + line * (S::kWidth / 2 * S::kTwo) + piece * 16, x, first_line + line < S::kOrder);
        }
        __syncwarp();
    }
};

// 16-bit values: sums[j][2h + e] is column 8j + g.
template <class S>
__device__ __forceinline__ void stage_values(const float (&tile)[8][4], const Staging<S>& staging, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = Float16<typename S::T>::pack(tile[j + i][2 * h], tile[j + i][2 * h + 1]);
            store_across(staging.at(8 * h + lane % 8, j + lane / 8), words);
        }
}

// Words for four matrices of packed codes, which half h and column 32 P of a tile are: word(P, h).
template <class S, class Word>
__device__ __forceinline__ void stage_packed(const Staging<S>& staging, int lane, Word word) {
    store_across(staging.at(lane / 16 * 8 + lane % 8, lane / 8 % 2), {word(0, 0), word(1, 0), word(0, 1), word(1, 1)});
}

// Codes in bytes: as below.
template <class S, class Word>
__device__ __forceinline__ void stage_held(const Staging<S>& staging, int lane, Word word) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        store_across(staging.at(8 * h + lane % 8, lane / 8), {word(0, h), word(2, h), word(4, h), word(6, h)});
}

template <class S>
__device__ __forceinline__ void stage_codes(const float (&tile)[8][4], const Staging<S>& staging, int lane,
                                            const E4m3Codes& codes) {
    stage_held<S>(staging, lane, [&](int j, int h) {
        return codes.pair(tile[j][2 * h], tile[j + 1][2 * h]) |
               codes.pair(tile[j][2 * h + 1], tile[j + 1][2 * h + 1]) << 16;
    });
}

// The largest of each of `Count` values over the lanes that differ in g, Count / 8 of them to a lane in the end: lane
// group g has those from g Count / 8 on. Each step halves what a lane is responsible for.
template <int Half, int Mask, int Count>
__device__ __forceinline__ void deal_half(float (&values)[Count], bool upper) {
#pragma unroll
    for (int k = 0; k < Half; ++k) {
        const float kept = upper ? values[k + Half] : values[k], given = upper ? values[k] : values[k + Half];
        values[k] = fmaxf(kept, __shfl_xor_sync(0xFFFFFFFFu, given, Mask));
    }
}

template <int Count>
__device__ __forceinline__ void deal_largest(float (&values)[Count], int lane) {
    deal_half<Count / 2, 16>(values, lane & 16);
    deal_half<Count / 4, 8>(values, lane & 8);
    deal_half<Count / 8, 4>(values, lane & 4);
}

// Floats of 4 bits, and the scales of the tile's groups to `scales`, of its first line there. Neighbouring columns share
// a byte, so a 16-bit element has bytes of two columns that lie 16 apart, which `Staging::flush` sorts.
template <class S, Output Out>
__device__ __forceinline__ void stage_groups(const float (&tile)[8][4], const Staging<S>& staging, int first_line,
                                             int lane, const GroupRange<Out>& range, char* scales) {
    constexpr int kGroups = kChunk / GroupRange<Out>::kSize, kEach = 8 / kGroups;  // of a line; columns of a lane in one
    constexpr int kOwn = kGroups / 2;  // groups of four lines that a lane finds the scales of
    const int g = lane / 4, t = lane % 4;
    float slopes[4 * kGroups];
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
        slopes[i] = 0.0f;
#pragma unroll
        for (int j = i % kGroups * kEach; j < (i % kGroups + 1) * kEach; ++j)
            slopes[i] = fmaxf(slopes[i], fabsf(tile[j][i / kGroups]));
    }
    deal_largest(slopes, lane);
    u32 stored = 0;
    float own[kOwn];
#pragma unroll
    for (int k = 0; k < kOwn; ++k) {
        const GroupScale scale = range.scale(slopes[k]);
        own[k] = scale.slope;
        stored |= scale.stored << 8 * k;
    }
    const int line = 8 * (g / 4) + 2 * t + g / 2 % 2;
    const bool valid = first_line + line < S::kOrder;
    char* to = scales + line * (S::kWidth / GroupRange<Out>::kSize) + g % 2 * kOwn;
    if constexpr (kOwn == 2)
        ptx::store_if(to, static_cast<unsigned short>(stored), valid);
    else
        ptx::store_byte_if(to, stored, valid);
#pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i)
        slopes[i] = __shfl_sync(0xFFFFFFFFu, own[i % kOwn], i / kOwn * 4 + t);

    const auto codes = [&](int j, int i) {  // of columns 16 apart
        return e2m1_pair(Float16<__half>::pack(tile[j][i] * slopes[i * kGroups + j / kEach],
                                               tile[j + 2][i] * slopes[i * kGroups + (j + 2) / kEach]));
    };
    stage_packed<S>(staging, lane, [&](int P, int h) {
        const int j = 4 * P, i = 2 * h;
        return __byte_perm(codes(j, i), codes(j, i + 1), 0x6420) +
               16 * __byte_perm(codes(j + 1, i), codes(j + 1, i + 1), 0x6420);
    });
}

// Codes: sums[2p + top][2h + e] is column 16p + 2g + top, and a piece holds 16 columns, or with packed codes 32.
template <class S, int Bits>
__device__ __forceinline__ void stage_codes(const float (&tile)[8][4], const Staging<S>& staging, int lane,
                                            const ScaledCodes<Bits>& codes) {
    const auto byte = [&](int j, int i) {
        const u32 code = codes.shifted(tile[j][i]);
        return Bits == 8 ? code : code + 16 * codes.shifted(tile[j + 2][i]);
    };
    const auto word = [&](int j, int h) {
        const u32 first = byte(j, 2 * h), second = byte(j + 1, 2 * h);
        return gather_bytes(first, second, byte(j, 2 * h + 1), byte(j + 1, 2 * h + 1)) ^ codes.kFlip;
    };
    if constexpr (Bits == 8)
        stage_held<S>(staging, lane, word);
    else
        stage_packed<S>(staging, lane, [&](int P, int h) { return word(4 * P, h); });
}

// A ring of rows as the tensor map brings them, and for each slot two barriers: the row is there, all warps have read
// it.
template <class S>
struct Ring {
    char* slots;
    u64 (*barriers)[S::kSlots];

    __device__ __forceinline__ u32 filled(int slot) const { return ptx::shared_address(barriers[0] + slot); }
    __device__ __forceinline__ u32 emptied(int slot) const { return ptx::shared_address(barriers[1] + slot); }
    __device__ __forceinline__ u32 at(int slot) const { return ptx::shared_address(slots + slot * S::kSlotBytes); }

    // Before the first row. Lines beyond the last meet signs, and must be finite.
    __device__ __forceinline__ void start() const {
        constexpr int kPadding = (S::kSteps * kTile - S::kOrder) * 8;  // pieces of 16 bytes
        for (int i = threadIdx.x; i < S::kSlots * S::kChunks * kPadding; i += 32 * S::kWarps)
            *reinterpret_cast<uint4*>(slots + i / max(kPadding, 1) * S::kChunkBytes + S::kOrder * 128 +
                                      i % max(kPadding, 1) * 16) = {0, 0, 0, 0};
        if (threadIdx.x == 0) {
            for (int slot = 0; slot < S::kSlots; ++slot) {
                ptx::mbarrier_init(filled(slot), 1);
                ptx::mbarrier_init(emptied(slot), S::kWarps);
            }
            ptx::mbarrier_init_fence();
        }
        ptx::fence_async_shared();
        __syncthreads();
    }

    // One thread asks for a row.
    __device__ __forceinline__ void fetch(int slot, const ptx::TensorMap& map, int row) const {
        ptx::mbarrier_arrive_expect(filled(slot), 2 * S::kElements);
#pragma unroll
        for (int c = 0; c < S::kChunks; ++c)
            ptx::tma_load_2d(at(slot) + c * S::kChunkBytes, map, c * kChunk, row * S::kOrder, filled(slot));
    }
};

// The row in a slot becomes its RMSNorm, where it is. All threads of the block; `scratch`: a float for each warp.
template <class S>
__device__ __forceinline__ void norm_in_place(char* slot, const RowNorm& norm, float* scratch) {
    using T = typename S::T;
    constexpr int kInChunk = S::kOrder * 8, kAll = S::kChunks * kInChunk, kThreads = 32 * S::kWarps;
    constexpr int kOwn = (kAll + kThreads - 1) / kThreads;  // pieces of 16 bytes
    uint4 x[kOwn];
    const auto each_piece = [&](auto operation) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int piece = threadIdx.x + i * kThreads, c = piece / kInChunk, at = piece % kInChunk;
            if (kAll % kThreads && piece >= kAll) break;
            // The swizzle: the eight pieces of a line lie in another order in each of eight lines.
            const int element = at / 8 * S::kWidth + c * kChunk + (at % 8 ^ at / 8 % 8) * 8;
            operation(x[i], reinterpret_cast<uint4*>(slot + c * S::kChunkBytes + at * 16), element);
        }
    };
    float squares = 0.0f;
    each_piece([&](uint4& piece, const uint4* place, int) {
        piece = *place;
        squares = add_squares<T>(piece, squares);
    });
    const float factor = norm_factor(norm, block_total<S::kWarps>(squares, scratch), S::kElements);
    each_piece([&](const uint4& piece, uint4* place, int element) {
        *place = normed<T>(piece, factor, norm, element);
    });
    ptx::fence_async_shared();
    __syncthreads();
}

// This warp's tile of the left factor times the row in a slot.
template <class S>
__device__ __forceinline__ void multiply_left(Sums<S>& sums, const Signs (&left)[S::kSteps], u32 row) {
    const auto operand = ptx::wgmma_descriptor(row);
    ptx::wgmma_fence();
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c)
#pragma unroll
        for (int k = 0; k < S::kSteps; ++k)  // descriptors count 16 bytes
            ptx::wgmma_half<typename S::T>(sums[c], left[k].r, operand + (c * S::kChunkBytes + k * kTile * 128) / 16,
                                           k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_finish(sums);
}

// The results of a warp's tile to memory, values or codes. `codes`: what makes them, with groups what finds scales.
template <class S, class Codes>
__device__ __forceinline__ void write_tile(const Sums<S>& sums, const Problem& p, int row, int first_line, int lane,
                                           const Staging<S>& staging, const Codes& codes) {
    const long long start = (long long)row * S::kElements + first_line * S::kWidth;
    char* out = static_cast<char*>(S::kOutput == kSame ? p.y : p.codes.codes) + start / 2 * S::kTwo;
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
        if constexpr (S::kOutput == kSame)
            stage_values<S>(sums[c], staging, lane);
        else if constexpr (kInGroups<S::kOutput>)
            stage_groups<S>(sums[c], staging, first_line, lane, codes,
                            reinterpret_cast<char*>(p.codes.scale) + row * (long long)(S::kElements / Codes::kSize) +
                                first_line * (S::kWidth / Codes::kSize) + c * (kChunk / Codes::kSize));
        else
            stage_codes<S>(sums[c], staging, lane, codes);
        staging.flush(out + c * (kChunk / 2 * S::kTwo), first_line, lane);
    }
}

// Blocks take one row after another. Dynamic shared memory: a ring of rows, 1024-byte aligned, then staging.
template <class Type, int Order, int Chunks, int Slots, Output Result, Kind What, int MinBlocks>
__global__ void __launch_bounds__(32 * Shape<Type, Order, Chunks, Slots, Result, What>::kWarps, MinBlocks)
    hadamard_across(const Problem p, const __grid_constant__ ptx::TensorMap map) {
    ptx::follow_previous_launch();
    using S = Shape<Type, Order, Chunks, Slots, Result, What>;
    extern __shared__ uint4 shared[];
    alignas(16) __shared__ float scratch[2][32];  // rows take turns, so that one barrier to a row suffices
    __shared__ u64 barriers[2][Slots];
    const Ring<S> ring{reinterpret_cast<char*>(shared) + (1024 - ptx::shared_address(shared) % 1024) % 1024, barriers};
    // One for a warp, and known to be so.
    const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Staging<S> staging{ring.slots + Slots * S::kSlotBytes + warp * S::kStaging};
    const Rows rows = rows_of_block(p.share, p.rows);
    ring.start();
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < Slots; ++slot)
            if (rows.first + slot * rows.step < rows.end) ring.fetch(slot, map, rows.first + slot * rows.step);
    }

    const Signs ones = block_ones<Type>(S::kSteps * kTile, lane / 4, lane % 4);
    Signs left[S::kSteps];
#pragma unroll
    for (int k = 0; k < S::kSteps; ++k)
        left[k] = left_operand(__ldg(p.signs + (warp * S::kSignWords + k / 4) * 32 + lane), k % 4, ones);
    const RightFactor<true> right = across_factor<Result>(lane / 4, lane % 4);
    const RangeOf<Result> range(p.codes, p.norm);

    int use = 0;
    for (int row = rows.first; row < rows.end; row += rows.step, ++use) {
        Sums<S> sums;
        ptx::mbarrier_wait(ring.filled(use % Slots), use / Slots & 1);
        if constexpr (S::kNormed) {
            alignas(16) __shared__ float squares[S::kWarps];
            norm_in_place<S>(ring.slots + use % Slots * S::kSlotBytes, p.row_norm, squares);
        }
        multiply_left<S>(sums, left, ring.at(use % Slots));
        if (lane == 0) ptx::mbarrier_arrive(ring.emptied(use % Slots));
        const int emptied = use - S::kDelay, next = row + (Slots - S::kDelay) * rows.step;
        if constexpr (S::kWarpWaits) {
            if (warp == 0 && emptied >= 0 && next < rows.end) {
                ptx::mbarrier_wait(ring.emptied(emptied % Slots), emptied / Slots & 1);
                if (lane == 0) ring.fetch(emptied % Slots, map, next);
                __syncwarp();
            }
        } else if (threadIdx.x == 0 && emptied >= 0 && next < rows.end) {
            ptx::mbarrier_wait(ring.emptied(emptied % Slots), emptied / Slots & 1);
            ring.fetch(emptied % Slots, map, next);
        }
        float largest = 0.0f;
        multiply_right<S>(sums, right, p.norm, largest);
        if constexpr (kInGroups<Result>) {
            write_tile<S>(sums, p, row, kTile * warp, lane, staging, range);
        } else {
            float scale = range.static_scale;
            if constexpr (Result != kSame) {
                if (!range.is_static) scale = range.scale(block_largest<S::kWarps>(largest, scratch[use % 2]));
                if (threadIdx.x == 0 && (row == 0 || !range.is_static)) p.codes.scale[row] = scale;
            }
            write_tile<S>(sums, p, row, kTile * warp, lane, staging, range.codes(scale));
        }
    }
}

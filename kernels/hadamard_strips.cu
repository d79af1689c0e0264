// Hadamard transform of 16-bit rows whose left factor is small, optionally followed by quantization (QuaRot Sec. 4).
//
// A row of n values is a matrix [Order, 64 * Warps * Strips] in row-major order; a warp takes strips of 64 columns,
// straight from memory to registers. H_n = H_Order (x) H_columns: the left factor meets the 16-bit values on tensor
// cores, where products with +-1 are exact and sums float32; then come the 64 columns of each strip
// (hadamard/tile.cuh), and at last, after the warps of a row have exchanged rows for columns through shared memory, the
// bits of the strip's number. The next row is on its way meanwhile.
// Architectures: sm_80 and newer.
#include "hadamard/strips_halves.cuh"
#include "hadamard/strips_left.cuh"
#include "hadamard/strips_sums.cuh"
#include "hadamard/strips_write.cuh"
#include "values/reduce.cuh"

// Each group of Warps warps takes one row after another. Dynamic shared memory: a ring of rows for each group, then,
// with an exchange, the row as float32, or half of it with two passes.
template <class Type, int Order, int Warps, int Strips, int Slots, int Passes, bool Columns, Output Result, Kind What,
          bool Half, int MinBlocks>
__global__ void __launch_bounds__(Warps == 1 ? 128 : 32 * Warps, MinBlocks) hadamard_strips(const Problem p) {
    ptx::follow_previous_launch();
    using S = Shape<Type, Order, Warps, Strips, Slots, Passes, Columns, Result, What, Half>;
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
    const RangeOf<Result> range(p.codes, Half ? 1.0f : p.norm);

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
        load_row<S>(pieces, from, offset, available - offset, lane, p.row_norm);
        Sums<S> sums;
        multiply_left<S>(sums, pieces, signs, ones);
        Group<(Warps > 1)>::sync();  // this slot, and what the last row exchanged, have been read
        fetch(slot, unit + Slots * units.step);
        const Place<S> place(row, warp, lane);
        Values<S> values;
        float largest = 0.0f;
        if constexpr (Half) {
            HalfValues<S> halves;
            finish_halves<S>(halves, sums, right, p.norm, exchanged, warp, lane);
            if constexpr (Result == kSame) {
                write_halves<S>(halves, p, place, lane);
                continue;
            }
            widen<S>(values, halves);
            largest = largest_of<S>(values);
        } else {
            finish_row<S>(values, sums, right, p.norm, exchanged, warp, lane, largest);
        }
        if constexpr (Result == kSame) {
            write_values<S>(values, p, place, lane);
        } else if constexpr (kInGroups<Result>) {
            write_groups<S>(values, p, place, range);
        } else {
            float scale = range.static_scale;
            if (!range.is_static) scale = range.scale(block_largest<Warps>(largest, scratch));
            if (warp == 0 && lane == 0 && (row == 0 || !range.is_static)) p.codes.scale[row] = scale;
            write_codes<S>(values, p, place, range.codes(scale));
        }
    }
}

// The first half of a row's way through hadamard_strips.cu: from the ring to registers, SwiGLU or RMSNorm, and the left
// factor. sm_80 and newer.
#pragma once

#include "hadamard/strips_shape.cuh"
#include "values/reduce.cuh"

// operation(piece, its first element after the lane's own) of each piece in memory order, where `valid`.
template <class S, class Operation>
__device__ __forceinline__ void each_piece(Pieces<S>& pieces, int lane, Operation operation) {
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s)
#pragma unroll
        for (int m = 0; m < S::kTiles; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int line = kTile * m + 8 * (r / 2) + r % 2, at = line * S::kWidth + kChunk * s;
                const bool valid = line + 6 < S::kOrder || line + lane / 8 * 2 < S::kOrder;
                operation(pieces[s][m][r], at, valid);
            }
}

// From a slot of the ring. `available`: values from `from` on that are there.
template <class S>
__device__ __forceinline__ void load_pieces(Pieces<S>& pieces, const char* from, int available, int lane) {
    each_piece<S>(pieces, lane, [&](uint4& piece, int at, bool valid) {
        piece = {0, 0, 0, 0};
        if (valid && (!S::kRagged || at < available)) piece = *reinterpret_cast<const uint4*>(from + 2 * at);
    });
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

// The row's RMSNorm. `offset`: the lane's first element in the row. `scratch`: a float for each warp, used once between
// two barriers.
template <class S>
__device__ __forceinline__ void norm_pieces(Pieces<S>& pieces, const RowNorm& norm, int offset, int lane,
                                            float* scratch) {
    using T = typename S::T;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kStrips * S::kTiles * 4; ++i) squares = add_squares<T>((&pieces[0][0][0])[i], squares);
    const float factor = norm_factor(norm, block_total<S::kWarps>(squares, scratch), S::kElements);
    each_piece<S>(pieces, lane, [&](uint4& piece, int at, bool valid) {
        if (valid) piece = normed<T>(piece, factor, norm, offset + at);
    });
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

// A warp's strips of the row at `from`, `offset` values from its start, as a product wants them.
template <class S>
__device__ __forceinline__ void load_row(Pieces<S>& pieces, const char* from, int offset, int available, int lane,
                                         const RowNorm& norm) {
    load_pieces<S>(pieces, from, available, lane);
    if constexpr (S::kNormed) {
        alignas(16) __shared__ float scratch[S::kWarps];
        norm_pieces<S>(pieces, norm, offset, lane, scratch);
    }
    if constexpr (S::kGated) {
        Pieces<S> up;
        load_pieces<S>(up, from + S::kHalfBytes, available, lane);
        gate_pieces<S>(pieces, up);
    }
    order_for_product<S>(pieces, lane);
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
                    ptx::mma_m16n8k16<typename S::T>(sums[s][m][i], a.r, lower, upper);
                }
        }
}

// Where a thread's values of a row lie in memory after hadamard_strips.cu, and their way there, as rows or as codes.
// sm_80 and newer.
#pragma once

#include "hadamard/strips_shape.cuh"

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

    // First element of line k's chunk 0 before `word`, within the row; k = 0 plus a constant where lines are dealt
    // evenly.
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
            ptx::store_if(out + 2 * at, x, place.exists(line) && (!S::kRagged || at + 8 * place.word < left));
        }
    }
}

template <class S>
__device__ __forceinline__ void write_values(const Values<S>& values, const Problem& p, const Place<S>& place,
                                             int lane) {
    using F = Float16<typename S::T>;
    const float factor = S::kNormInChunks || S::kNormInColumns ? 1.0f : p.norm;
    const auto vector = [&](int k, int c) {
        const float(&v)[8] = values[k][c];
        return uint4{F::pack(v[0] * factor, v[1] * factor), F::pack(v[2] * factor, v[3] * factor),
                     F::pack(v[4] * factor, v[5] * factor), F::pack(v[6] * factor, v[7] * factor)};
    };
    write_vectors<S>(vector, p, place, lane);
}

template <class S>
__device__ __forceinline__ void write_halves(const HalfValues<S>& values, const Problem& p, const Place<S>& place,
                                             int lane) {
    const auto vector = [&](int k, int c) {
        const u32(&v)[4] = values[k][c];
        return uint4{v[0], v[1], v[2], v[3]};
    };
    write_vectors<S>(vector, p, place, lane);
}

// Codes in bytes, or packed.
template <class S, class Codes>
__device__ __forceinline__ void write_codes(const Values<S>& values, const Problem& p, const Place<S>& place,
                                            const Codes& codes) {
    constexpr int kBytesPerTwo = kBytesOfTwo<S::kOutput>, kOwn = 4 * kBytesPerTwo;
    char* out = static_cast<char*>(p.codes.codes) + place.row * (S::kElements / 2 * kBytesPerTwo) + kOwn * place.word;
#pragma unroll
    for (int k = 0; k < S::kFinalLines; ++k) {
        const int line = place.line(k);
        char* to = out + line * (S::kWidth / 2 * kBytesPerTwo) + place.first_chunk() * (kChunk / 2 * kBytesPerTwo);
        const bool valid = place.exists(line);
#pragma unroll
        for (int c = 0; c < S::kFinalChunks; ++c) {
            if constexpr (S::kOutput == kInt4) {
                ptx::store_if(to + c * (kChunk / 2), codes.packed(values[k][c]), valid);
            } else {
                ptx::store_if(to + c * kChunk, codes.held(values[k][c]), valid);
            }
        }
    }
}

// Floats of 4 bits, and a scale for each group of neighbouring lanes' columns.
template <class S, class Range>
__device__ __forceinline__ void write_groups(const Values<S>& values, const Problem& p, const Place<S>& place,
                                             const Range& range) {
    constexpr int kNeighbour = S::kExchange ? 1 : 4, kSize = Range::kSize, kLanes = kSize / 8;
    char* codes = static_cast<char*>(p.codes.codes) + place.row * (S::kElements / 2) + 4 * place.word +
                  place.first_chunk() * (kChunk / 2);
    char* scales = reinterpret_cast<char*>(p.codes.scale) + place.row * (S::kElements / kSize) +
                   static_cast<unsigned>(place.word) / kLanes + place.first_chunk() * (kChunk / kSize);
    const bool leads = place.word % kLanes == 0;
#pragma unroll
    for (int k = 0; k < S::kFinalLines; ++k) {
        const int line = place.line(k);
        const bool valid = place.exists(line);
#pragma unroll
        for (int c = 0; c < S::kFinalChunks; ++c)
            write_group<kNeighbour>(range, values[k][c], codes + line * (S::kWidth / 2) + c * (kChunk / 2),
                                    scales + line * (S::kWidth / kSize) + c * (kChunk / kSize), leads, valid);
    }
}

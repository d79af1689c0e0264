// The 4-bit KV cache on the device: where a token lies (rotquant/kernels/layouts/cache.py), and one head's vector in a
// warp, with RoPE and the Hadamard transform on it (QuaRot Sec. 4, stage 1d). Nothing here quantizes. sm_80 and newer.
#pragma once

#include "values/element.cuh"
#include "values/reduce.cuh"

namespace kv {

constexpr int kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;

// How a cache is quantized. Groups of a head's elements have a scale and a zero point for each token, beside its codes;
// without groups (0) the whole head has one static scale for all tokens, and codes have this zero point (PrefixQuant).
constexpr int kStatic = 0;
constexpr float kStaticZero = 8.f;

template <int Groups>
struct ParamsOf {
    using Type = __half2;  // of a token and group
};
template <>
struct ParamsOf<kStatic> {
    using Type = float;  // of a head
};
template <int Groups>
using Params = typename ParamsOf<Groups>::Type;

// Scales of one token's head.
template <int Groups>
constexpr int kScales = Groups == kStatic ? 1 : Groups;

// Pages of a cache: `table` [batch, per_sequence] of page numbers, or null for consecutive pages.
struct Pages {
    const int* table;
    int count;         // pages of the pool
    int per_sequence;  // pages of one sequence
    int size;          // tokens of a page

    __device__ __forceinline__ int capacity() const { return per_sequence * size; }

    // A number outside the pool is taken for the nearest inside, so that a broken table reads no foreign memory.
    __device__ __forceinline__ int number(int sequence, int index) const {
        const int place = sequence * per_sequence + index;
        return table == nullptr ? place : min(max(table[place], 0), count - 1);
    }

    // Number of the (page, head) that holds a position.
    __device__ __forceinline__ long long plane(int sequence, int position, int head, int heads) const {
        return static_cast<long long>(number(sequence, position / size)) * heads + head;
    }
};

// One head's vector in a warp: lane l holds elements l + 32 i. So do the halves of a RoPE pair fall to one lane, and
// the elements 32 i .. 32 i + 31 of a quantization group to one register of all lanes.
template <int D>
struct HeadVector {
    static constexpr int kN = D / kWarp;
    float x[kN];

    template <class T>
    __device__ __forceinline__ void load(const T* head, int lane) {
#pragma unroll
        for (int i = 0; i < kN; ++i) x[i] = static_cast<float>(head[lane + kWarp * i]);
    }

    // Half rotation; each product and the sum are rounded to T, as transformers computes them.
    template <class T>
    __device__ __forceinline__ void rope(const T* cos, const T* sin, int lane) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) {
            const float a = x[i], b = x[i + kN / 2];
            const int low = lane + kWarp * i, high = low + D / 2;
            x[i] = rounded<T>(rounded<T>(a * static_cast<float>(cos[low])) +
                              rounded<T>(-b * static_cast<float>(sin[low])));
            x[i + kN / 2] = rounded<T>(rounded<T>(b * static_cast<float>(cos[high])) +
                                       rounded<T>(a * static_cast<float>(sin[high])));
        }
    }

    // Normalized Sylvester-Hadamard transform, in float32.
    __device__ __forceinline__ void hadamard(int lane) {
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
#pragma unroll
            for (int i = 0; i < kN; ++i) {
                const float other = __shfl_xor_sync(kAllLanes, x[i], step);
                x[i] = lane & step ? other - x[i] : x[i] + other;
            }
        }
#pragma unroll
        for (int step = 1; step < kN; step *= 2) {
#pragma unroll
            for (int i = 0; i < kN; ++i) {
                if ((i & step) == 0) {
                    const float a = x[i], b = x[i + step];
                    x[i] = a + b;
                    x[i + step] = a - b;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kN; ++i) x[i] *= D == 64 ? 0.125f : 0.08838834764831845f;
    }

    template <class T>
    __device__ __forceinline__ void round() {
#pragma unroll
        for (int i = 0; i < kN; ++i) x[i] = rounded<T>(x[i]);
    }
};

// Offset in a page of one head of the byte of key elements d, d + 1 (d even).
template <int D>
__device__ __forceinline__ int key_byte(int slot, int d) {
    return slot * (D / 2) + d % 32 / 8 * (D / 8) + d / 32 * 4 + d % 8 / 2;
}

// Offset of the byte of value elements d, d + 8 (d % 16 < 8).
template <int D>
__device__ __forceinline__ int value_byte(int slot, int d) {
    const int tile = d / 16, g = d % 8, s = slot % 16;
    const int word = (tile / 4 * kWarp + 4 * g + s % 8 / 2) * 4 + tile % 4;
    return slot / 16 * (8 * D) + 4 * word + 2 * (s % 2) + s / 8;
}

}  // namespace kv

// Matrix products of a warp's registers on tensor cores (mma.sync): D [16, 8], A [16, K] in rows, B [K, 8] in columns.
// With lane = 4g + t, D holds columns 2t and 2t + 1 of row g, then of row g + 8. Of A, even words are of row g and odd
// ones of row g + 8; word 0 or 1 begins at k = t times the values of a word, words 2 and 3 half of K later. Of B, words
// have the same k, of column g. sm_80 and newer.
#pragma once

#include "ptx/instructions.cuh"

namespace ptx {

// ---- d += a b ----

__device__ __forceinline__ void mma_m16n8k32_s8(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Native on sm_80, sm_86 and sm_89; emulated, correct and slow, on Hopper.
__device__ __forceinline__ void mma_m16n8k64_s4(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16-bit floats of type T, sums in float32; a K of 8 has half of A and of B.
template <class T>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], u32 a0, u32 a1, u32 b);
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

#define RQ_MMA_K8(type)                                                                                                \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "                \
        "{%0, %1, %2, %3};"                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
        : "r"(a0), "r"(a1), "r"(b))
#define RQ_MMA_K16(type)                                                                                               \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "   \
        "{%0, %1, %2, %3};"                                                                                            \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <>
__device__ __forceinline__ void mma_m16n8k8<__half>(float (&d)[4], u32 a0, u32 a1, u32 b) {
    RQ_MMA_K8("f16");
}
template <>
__device__ __forceinline__ void mma_m16n8k8<__nv_bfloat16>(float (&d)[4], u32 a0, u32 a1, u32 b) {
    RQ_MMA_K8("bf16");
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    RQ_MMA_K16("f16");
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    RQ_MMA_K16("bf16");
}
#undef RQ_MMA_K8
#undef RQ_MMA_K16

// Of tf32: the hardware reads the upper 19 bits of each float.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// ---- d = a b ----

// Of float16, each result rounded once; two neighbouring results to a word.
__device__ __forceinline__ void mma_m16n8k16_half(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %8};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0u));
}

// Of bits: d = popcount(a & b).
__device__ __forceinline__ void mma_m16n8k128_and(int (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, "
        "%7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

__device__ __forceinline__ void mma_m16n8k256_and(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(0));
}

}  // namespace ptx

// Tensor-core products with a matrix of +-1. sm_80 and newer.
#pragma once

#include "element.cuh"

// The four registers of a 16 x 16 left operand in 16 bits: rows g and g + 8, columns 2t.. and 2t + 8.. (lane = 4g + t).
struct Signs {
    unsigned r[4];
};

// d[16 x 8] += a[16 x 16] b[16 x 8], sums in float32.
template <class T>
__device__ __forceinline__ void mma_16n8k16(float (&d)[4], const Signs& a, unsigned b0, unsigned b1);

template <>
__device__ __forceinline__ void mma_16n8k16<__half>(float (&d)[4], const Signs& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16n8k16<__nv_bfloat16>(float (&d)[4], const Signs& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

// d[16 x 8] += a[16 x 8] b[8 x 8] of tf32: the hardware reads the upper 19 bits of each float.
__device__ __forceinline__ void mma_16n8k8_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// d[16 x 8] = a[16 x 16] b[16 x 8] of float16, each result rounded once.
__device__ __forceinline__ void mma_16n8k16_half(unsigned (&d)[2], const Signs& a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1), "r"(0u));
}

// The part of x that tf32 holds exactly; x minus it is exact, and tf32 holds all but its last two or three bits.
__device__ __forceinline__ float tf32_head(float x) {
    return __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);
}

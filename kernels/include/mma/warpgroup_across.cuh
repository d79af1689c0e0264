// Hopper's warpgroup matrix instructions on 16-bit floats (sm_90a): D = A B + D with A from registers, B from shared
// memory read across: rows of B are K, 64 columns of it 128 bytes, in the 128-byte swizzle of the copy engine. D is
// [64, 64] float32: thread 32 w + 4 g + t holds, in d[j][2 h + i], row 16 w + g + 8 h and column 8 j + 2 t + i.
#pragma once

#include "values/element.cuh"
#include "mma/warpgroup_s8.cuh"

namespace ptx {

// D += A B with `add`, else D = A B, A and B of type T.
template <class T>
__device__ __forceinline__ void wgmma_half(float (&d)[8][4], const u32 (&a)[4], u64 descriptor, int add);

#define RQ_D4(d, j) "+f"((d)[j][0]), "+f"((d)[j][1]), "+f"((d)[j][2]), "+f"((d)[j][3])
#define RQ_WGMMA_HALF(type)                                                                                            \
    asm volatile(                                                                                                      \
        "{\n"                                                                                                          \
        ".reg .pred add;\n"                                                                                            \
        "setp.ne.b32 add, %37, 0;\n"                                                                                   \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                                                \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "        \
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                                                          \
        "{%32, %33, %34, %35}, %36, add, 1, 1, 1;\n"                                                                   \
        "}\n"                                                                                                          \
        : RQ_D4(d, 0), RQ_D4(d, 1), RQ_D4(d, 2), RQ_D4(d, 3), RQ_D4(d, 4), RQ_D4(d, 5), RQ_D4(d, 6), RQ_D4(d, 7)       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add))

template <>
__device__ __forceinline__ void wgmma_half<__half>(float (&d)[8][4], const u32 (&a)[4], u64 descriptor, int add) {
    RQ_WGMMA_HALF("f16");
}

template <>
__device__ __forceinline__ void wgmma_half<__nv_bfloat16>(float (&d)[8][4], const u32 (&a)[4], u64 descriptor,
                                                          int add) {
    RQ_WGMMA_HALF("bf16");
}
#undef RQ_WGMMA_HALF
#undef RQ_D4

// Wait for all committed products of this warpgroup, whose results are in `d`.
template <int Chunks>
__device__ __forceinline__ void wgmma_finish(float (&d)[Chunks][8][4]) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Chunks * 32; ++i) asm volatile("" : "+f"((&d[0][0][0])[i])::"memory");
}

}  // namespace ptx

// Four 8 x 8 matrices of 16 bits, of which a thread holds two neighbours of a column, by rows: lane l gives the address
// of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_across(char* to, const u32 (&words)[4]) {
    ptx::stmatrix_x4_trans(ptx::shared_address(to), words[0], words[1], words[2], words[3]);
}

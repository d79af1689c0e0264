// Hopper's warpgroup matrix instructions on 16-bit floats (sm_90a) for few rows: D = A B + D with A from registers and B
// from shared memory, its 16, 32 or 64 rows in the layout of `wgmma_descriptor`. D is [64, N] float32: thread
// 32 w + 4 g + t holds, in d[j][2 h + i], row 16 w + g + 8 h and column 8 j + 2 t + i. A is [64, 16]: words (0, 1) are
// rows 16 w + g and 16 w + g + 8 at columns 2 t and 2 t + 1, words (2, 3) the same 8 columns later.
#pragma once

#include <cuda/std/type_traits>

#include "values/element.cuh"
#include "mma/warpgroup_s8.cuh"

namespace ptx {

#define RQ_D4(j) "+f"(d[j][strip][0]), "+f"(d[j][strip][1]), "+f"(d[j][strip][2]), "+f"(d[j][strip][3])
#define RQ_D8(j) RQ_D4(j), RQ_D4(j + 1)
#define RQ_D16(j) RQ_D8(j), RQ_D8(j + 2)
#define RQ_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add)

#define RQ_WGMMA_16(type)                                                                                              \
    asm volatile(                                                                                                      \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"                                                               \
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7}, "              \
        "{%8, %9, %10, %11}, %12, add, 1, 1, 0;\n}\n"                                                                  \
        : RQ_D8(0)                                                                                                     \
        : RQ_A)
#define RQ_WGMMA_32(type)                                                                                              \
    asm volatile(                                                                                                      \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"                                                               \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "  \
        "%11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}\n"                                      \
        : RQ_D16(0)                                                                                                    \
        : RQ_A)
#define RQ_WGMMA_64(type)                                                                                              \
    asm volatile(                                                                                                      \
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                               \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "  \
        "%11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "   \
        "{%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}\n"                                                                \
        : RQ_D16(0), RQ_D16(4)                                                                                         \
        : RQ_A)
#define RQ_WGMMA(type)                                                                                                 \
    if constexpr (Tiles == 2)                                                                                          \
        RQ_WGMMA_16(type);                                                                                             \
    else if constexpr (Tiles == 4)                                                                                     \
        RQ_WGMMA_32(type);                                                                                             \
    else                                                                                                               \
        RQ_WGMMA_64(type)

// d[.][strip] += A B with `add`, else A B; Tiles times 8 rows of B.
template <class T, int Tiles, int Strips>
__device__ __forceinline__ void wgmma_rows(float (&d)[Tiles][Strips][4], int strip, const u32 (&a)[4], u64 descriptor,
                                           int add) {
    static_assert(Tiles == 2 || Tiles == 4 || Tiles == 8);
    if constexpr (cuda::std::is_same_v<T, __half>) {
        RQ_WGMMA("f16");
    } else {
        RQ_WGMMA("bf16");
    }
}

#undef RQ_WGMMA
#undef RQ_WGMMA_64
#undef RQ_WGMMA_32
#undef RQ_WGMMA_16
#undef RQ_A
#undef RQ_D16
#undef RQ_D8
#undef RQ_D4

// After a wait: tell the compiler that instructions have written these sums.
template <int Tiles, int Strips>
__device__ __forceinline__ void keep_sums(float (&d)[Tiles][Strips][4]) {
#pragma unroll
    for (int i = 0; i < Tiles * Strips * 4; ++i) asm volatile("" : "+f"((&d[0][0][0])[i])::"memory");
}

}  // namespace ptx

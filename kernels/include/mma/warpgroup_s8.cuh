// Hopper's warpgroup matrix instructions on int8 (sm_90a): D = A B + D with A from registers and B from shared memory.
// D is [64, N] int32: thread 32 w + 4 g + t of the warpgroup holds, in d[4 j + 2 h + i], row 16 w + g + 8 h and column
// 8 j + 2 t + i. A is [64, 32] int8: its word 2 c + h is row 16 w + g + 8 h, columns 16 c + 4 t to 16 c + 4 t + 3.
#pragma once

#include "ptx/instructions.cuh"

namespace ptx {

// B as N rows of 128 bytes (K runs along a row) in the 128-byte swizzle of the copy engine, starting at a multiple of
// 1024 bytes; groups of eight rows follow one another. A step of 32 along K adds 2 to the descriptor.
__device__ __forceinline__ u64 wgmma_descriptor(u32 shared) {
    constexpr u64 kSwizzle128 = 1ull << 62, kEightRows = u64(1024 >> 4) << 32, kUnused = 1ull << 16;
    return kSwizzle128 | kEightRows | kUnused | ((shared & 0x3FFFF) >> 4);
}

// Before the first instruction, and after registers that one will read have been written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `Pending` committed groups of this warpgroup are under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Tell the compiler that these registers may have changed, so that it neither moves nor reuses them across this point.
template <class T, int Count>
__device__ __forceinline__ void keep_registers(T (&r)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

#define RQ_D4(d, i) "+r"((d)[i]), "+r"((d)[i + 1]), "+r"((d)[i + 2]), "+r"((d)[i + 3])
#define RQ_D16(d, i) RQ_D4(d, i), RQ_D4(d, i + 4), RQ_D4(d, i + 8), RQ_D4(d, i + 12)
#define RQ_D32(d) RQ_D16(d, 0), RQ_D16(d, 16)
#define RQ_D64(d) RQ_D32(d), RQ_D16(d, 32), RQ_D16(d, 48)

// `add` zero: D = A B. N = 64 or 128 by the size of d.
__device__ __forceinline__ void wgmma_s8(int (&d)[32], const u32 (&a)[4], u64 descriptor, int add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add;\n"
        "}\n"
        : RQ_D32(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add));
}

__device__ __forceinline__ void wgmma_s8(int (&d)[64], const u32 (&a)[4], u64 descriptor, int add) {
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, "
        "{%64, %65, %66, %67}, %68, add;\n"
        "}\n"
        : RQ_D64(d)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(add));
}

#undef RQ_D4
#undef RQ_D16
#undef RQ_D32
#undef RQ_D64

}  // namespace ptx

// PTX instructions that CUDA C++ has no name for, one per function. Nothing here knows what a kernel computes.
// Architectures: sm_80 and newer; what needs Hopper stands under the heading that says so.
#pragma once

#include <cuda_fp16.h>
#include <cuda_bf16.h>

#include "values/words.cuh"

namespace ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- asynchronous copies from global to shared memory (sm_80) ----

// 16 bytes, past L1. With `valid` false, zeros are written and global memory is not read.
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

// 4 bytes; zeros without reading where not `valid`.
__device__ __forceinline__ void cp_async_4(u32 shared, const void* global, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `Pending` of this thread's groups are under way.
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// ---- global memory ----

// 16 bytes that are read once, past L1; where not `valid`, `v` stays. In place, so that nothing waits for the load.
__device__ __forceinline__ void load_stream_16(uint4& v, const uint4* pointer, bool valid) {
    asm volatile(
        "{\n"
        ".reg .pred valid;\n"
        "setp.ne.b32 valid, %5, 0;\n"
        "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(pointer), "r"(static_cast<int>(valid)));
}

// Stores under a predicate: what is stored is computed either way, so no branch surrounds the computation. Narrow ones
// leave the cache first, which they gain from; stores of 16 bytes are ordinary.
__device__ __forceinline__ void store_if(void* to, u32 x, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.cs.u32 [%0], %1;\n}" ::"l"(to), "r"(x),
                 "r"(static_cast<u32>(valid))
                 : "memory");
}

__device__ __forceinline__ void store_if(void* to, uint2 x, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p st.global.cs.v2.u32 [%0], {%1, %2};\n}" ::"l"(to),
                 "r"(x.x), "r"(x.y), "r"(static_cast<u32>(valid))
                 : "memory");
}

__device__ __forceinline__ void store_if(void* to, uint4 x, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(static_cast<u32>(valid))
                 : "memory");
}

__device__ __forceinline__ void store_if(void* to, unsigned short x, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.u16 [%0], %1;\n}" ::"l"(to), "h"(x),
                 "r"(static_cast<u32>(valid))
                 : "memory");
}

// The low byte of x.
__device__ __forceinline__ void store_byte_if(void* to, u32 x, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.u8 [%0], %1;\n}" ::"l"(to), "r"(x),
                 "r"(static_cast<u32>(valid))
                 : "memory");
}

// ---- shared memory by address ----

__device__ __forceinline__ void load_shared_16(u32 (&r)[4], u32 shared) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

__device__ __forceinline__ void load_shared_8(u32 (&r)[2], u32 shared) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared) : "memory");
}

__device__ __forceinline__ float load_shared_float(u32 shared) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(shared) : "memory");
    return value;
}

// ---- between shared memory and registers (ldmatrix sm_80, stmatrix sm_90) ----

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

// Two of them; lanes 0 to 15 give the addresses.
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared)
                 : "memory");
}

// An 8x8 matrix of 16-bit elements transposed: lane 4 g + t holds row g, columns 2 t and 2 t + 1.
__device__ __forceinline__ u32 movmatrix_trans(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// ---- arithmetic ----

// a b + c of two pairs of 16-bit floats, rounded once.
__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Magnitudes of a pair of float16. Not a mask, so that it becomes a part of the operation that takes it.
__device__ __forceinline__ u32 abs_f16x2(u32 a) {
    u32 d;
    asm("abs.f16x2 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// (word & mask) ^ bits, one instruction also with two constants.
__device__ __forceinline__ u32 masked_xor(u32 word, u32 mask, u32 bits) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890

// The nearest numbers of E4M3, `low` in the low byte; what is larger saturates (sm_89).
__device__ __forceinline__ u32 e4m3x2(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

#endif

// 1 / x of a normal x below 2^126, to one unit in the last place.
__device__ __forceinline__ float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 2^x within 2 ulp; denormal results are zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- Hopper (sm_90): barriers in shared memory, the tensor copy engine, clusters ----

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// Descriptor of a tensor for the copy engine, made by the host (cuTensorMapEncodeTiled).
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

__device__ __forceinline__ void stmatrix_x4_trans(u32 shared, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// Number of arrivals that complete a phase of an mbarrier.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Make initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// After its last phase, before its memory serves for anything else.
__device__ __forceinline__ void mbarrier_invalidate(u32 barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive and announce `bytes` that the copy engine will deliver in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrive at the same barrier of the block with this rank in the cluster (its own rank is allowed).
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Block until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Consecutive bytes, a multiple of 16 at addresses that are one, into shared memory; they complete on `barrier`.
__device__ __forceinline__ void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Box at (column, row) of a 2-D tensor into shared memory; its bytes complete on `barrier`. Outside lie zeros.
__device__ __forceinline__ void tma_load_2d(u32 shared, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(shared),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same into every block of `mask` (bit = rank in the cluster), at the same offsets of data and barrier.
__device__ __forceinline__ void tma_load_2d_multicast(u32 shared, const TensorMap& map, int column, int row,
                                                      u32 barrier, unsigned short mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(shared),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(mask)
        : "memory");
}

// Box from shared memory to a 2-D tensor; what lies outside the tensor is not written.
__device__ __forceinline__ void tma_store_2d(const TensorMap& map, u32 shared, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(shared)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all but `Pending` of this thread's stores have read their shared memory, so that it may be written again.
template <int Pending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Wait until this thread's stores have arrived.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Order ordinary writes to shared memory before reads by the copy engine or the tensor cores.
__device__ __forceinline__ void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// 16 bytes at `shared`, an address in this block's shared memory, from the block with this rank in the cluster.
__device__ __forceinline__ void load_cluster_16(u32 (&r)[4], u32 shared, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [remote];\n"
        "}\n"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
        : "r"(shared), "r"(rank)
        : "memory");
}

#endif

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Registers per thread of this warpgroup from here on.
template <int Count>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

#endif

// ---- launches that overlap (sm_90; before that, and in an ordinary launch, these do nothing) ----

// Let the next launch of the stream start: its blocks move in as this launch's leave room.
__device__ __forceinline__ void release_next_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until everything that earlier launches wrote is there to be read.
__device__ __forceinline__ void await_previous_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// For a kernel that reads nothing early: the next launch may move in at once, and fetch its weight meanwhile.
__device__ __forceinline__ void follow_previous_launch() {
    release_next_launch();
    await_previous_launch();
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among `Threads` threads of the block.
template <int Threads>
__device__ __forceinline__ void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(Threads) : "memory");
}

}  // namespace ptx

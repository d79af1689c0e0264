// Rows of a matrix on their way into shared memory: a ring of slots that a group of threads fills ahead of its use, by
// the bulk copy engine on Hopper (one thread asks, a barrier in shared memory tells) and by 16-byte copies of all
// threads on sm_80 to sm_89. A slot holds what memory holds, in the same order.
#pragma once

#include "ptx/instructions.cuh"

// The threads that share a row: a whole block, or one warp of it.
template <bool IsBlock>
struct Group {
    static __device__ __forceinline__ int size() { return IsBlock ? blockDim.x : 32; }
    static __device__ __forceinline__ int rank() { return IsBlock ? threadIdx.x : threadIdx.x % 32; }
    static __device__ __forceinline__ void sync() {
        if constexpr (IsBlock) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    }
};

// Slots of `SlotBytes`, then a barrier of eight bytes for each.
template <class Threads, int Slots, int SlotBytes>
struct RowRing {
    static constexpr int kBytes = (SlotBytes * Slots + 8 * Slots + 15) / 16 * 16;
    char* slots;

    // Before the first row; other threads see it after a barrier of the whole block.
    __device__ __forceinline__ void start() const {
#if __CUDA_ARCH__ >= 900
        if (Threads::rank() == 0) {
            for (int slot = 0; slot < Slots; ++slot) ptx::mbarrier_init(barrier(slot), 1);
            ptx::mbarrier_init_fence();
        }
#endif
    }

    // Ask for a row, or for nothing with `bytes` 0: every thread of the group calls this once for each row in turn.
    __device__ __forceinline__ void fetch(int slot, const void* row, int bytes) const {
#if __CUDA_ARCH__ >= 900
        if (Threads::rank() != 0 || bytes == 0) return;
        ptx::mbarrier_arrive_expect(barrier(slot), bytes);
        ptx::bulk_load(ptx::shared_address(at(slot)), row, bytes, barrier(slot));
#else
        for (int i = 16 * Threads::rank(); i < bytes; i += 16 * Threads::size())
            ptx::cp_async_16(ptx::shared_address(at(slot) + i), static_cast<const char*>(row) + i);
        ptx::cp_async_commit();
#endif
    }

    // Until the row of use number `use` of all, counted from 0, is there for the whole group.
    __device__ __forceinline__ void wait(int slot, int use) const {
#if __CUDA_ARCH__ >= 900
        ptx::mbarrier_wait(barrier(slot), use / Slots & 1);
#else
        ptx::cp_async_wait<Slots - 1>();
        Threads::sync();
#endif
    }

    __device__ __forceinline__ char* at(int slot) const { return slots + slot * SlotBytes; }

   private:
      __device__ __forceinline__ u32 barrier(int slot) const {
          return ptx::shared_address(slots + Slots * SlotBytes + 8 * slot);
      }
};

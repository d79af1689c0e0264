// A warp's way to the 4-bit KV cache: tiles of consecutive tokens, fetched ahead into a ring in shared memory. On
// Hopper the copy engine brings a tile in four pieces, one instruction each; elsewhere all lanes copy 16 bytes at a
// time. Nothing here computes. sm_80 and newer.
#pragma once

#include "kv/head.cuh"
#include "ptx/instructions.cuh"

namespace kv {

// Codes and parameters of TILE consecutive tokens of a head.
template <int D, int GROUPS, int TILE>
struct Stage {
    static constexpr int CODES = TILE * D / 2, PARAMS = TILE * GROUPS * 4;
    unsigned char k[CODES], v[CODES];
    __half2 k_params[TILE * GROUPS], v_params[TILE * GROUPS];
};

template <int D, int TILE>
struct Stage<D, STATIC, TILE> {
    static constexpr int CODES = TILE * D / 2;
    unsigned char k[CODES], v[CODES];
};

// The cache in global memory, all pages of all heads in a row.
template <int D, int GROUPS>
struct Pools {
    const unsigned char *k, *v;
    const Params<GROUPS>*k_params, *v_params;
};

template <int D, int GROUPS, int TILE, int STAGES>
struct alignas(16) Ring {
    Stage<D, GROUPS, TILE> stage[STAGES];
    unsigned long long arrived[STAGES];  // mbarriers, on Hopper
};

#if __CUDA_ARCH__ >= 900
constexpr bool COPY_ENGINE = true;
#else
constexpr bool COPY_ENGINE = false;
#endif

// One warp's use of its ring: `fetch` or `fetch_nothing` at the back, `wait` for and `pop` at the front, in turn.
template <int D, int GROUPS, int TILE, int STAGES>
struct Reader {
    using Stage = kv::Stage<D, GROUPS, TILE>;
    Ring<D, GROUPS, TILE, STAGES>& ring;
    int lane, back = 0, front = 0, parity = 0;

    __device__ __forceinline__ Reader(Ring<D, GROUPS, TILE, STAGES>& ring, int lane) : ring(ring), lane(lane) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            for (int i = 0; i < STAGES; ++i) ptx::mbarrier_init(barrier(i), 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
#endif
    }

    // Start copying TILE tokens from token number `token` of the pools; every lane has read what lay in this stage.
    __device__ __forceinline__ void fetch(const Pools<D, GROUPS>& pools, long long token) {
        Stage& stage = ring.stage[back];
#if __CUDA_ARCH__ >= 900
        if (lane == 0) ptx::mbarrier_arrive_expect(barrier(back), sizeof(Stage));
#endif
        copy<Stage::CODES>(stage.k, pools.k + token * (D / 2));
        copy<Stage::CODES>(stage.v, pools.v + token * (D / 2));
        if constexpr (GROUPS != STATIC) {
            copy<Stage::PARAMS>(stage.k_params, pools.k_params + token * GROUPS);
            copy<Stage::PARAMS>(stage.v_params, pools.v_params + token * GROUPS);
        }
        fetch_nothing();
    }

    __device__ __forceinline__ void fetch_nothing() {
        if constexpr (!COPY_ENGINE) ptx::cp_async_commit();
        back = back + 1 == STAGES ? 0 : back + 1;
    }

    // The oldest stage, when STAGES - 1 have been started and it has arrived.
    __device__ __forceinline__ const Stage& wait() {
#if __CUDA_ARCH__ >= 900
        ptx::mbarrier_wait(barrier(front), parity);
#else
        ptx::cp_async_wait<STAGES - 2>();
#endif
        __syncwarp();  // also: all lanes have done with the stage before, so it may be fetched into
        return ring.stage[front];
    }

    __device__ __forceinline__ void pop() {
        front = front + 1 == STAGES ? 0 : front + 1;
        if (front == 0) parity ^= 1;
    }

    // When every tile that was fetched has been waited for: the ring's memory may then serve for something else.
    __device__ __forceinline__ void close() {
#if __CUDA_ARCH__ >= 900
        if (lane == 0)
            for (int i = 0; i < STAGES; ++i) ptx::mbarrier_invalidate(barrier(i));
#endif
    }

private:
    __device__ __forceinline__ ptx::u32 barrier(int i) const { return ptx::shared_address(&ring.arrived[i]); }

    template <int BYTES>
    __device__ __forceinline__ void copy(void* shared, const void* global) {
        const ptx::u32 to = ptx::shared_address(shared);
#if __CUDA_ARCH__ >= 900
        if (lane == 0) ptx::bulk_load(to, global, BYTES, barrier(back));
#else
#pragma unroll
        for (int at = lane * 16; at < BYTES; at += WARP * 16)
            ptx::cp_async_16(to + at, static_cast<const char*>(global) + at);
#endif
    }
};

}  // namespace kv

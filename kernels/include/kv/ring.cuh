// A warp's way to the 4-bit KV cache: tiles of consecutive tokens, fetched ahead into a ring in shared memory. On
// Hopper the copy engine brings a tile in four pieces, one instruction each; elsewhere all lanes copy 16 bytes at a
// time. Nothing here computes. sm_80 and newer.
#pragma once

#include "kv/head.cuh"
#include "ptx/instructions.cuh"

namespace kv {

// Codes and parameters of consecutive tokens of a head.
template <int D, int Groups, int TileTokens>
struct Stage {
    static constexpr int kCodes = TileTokens * D / 2, kParams = TileTokens * Groups * 4;
    unsigned char k[kCodes], v[kCodes];
    __half2 k_params[TileTokens * Groups], v_params[TileTokens * Groups];
};

template <int D, int TileTokens>
struct Stage<D, kStatic, TileTokens> {
    static constexpr int kCodes = TileTokens * D / 2;
    unsigned char k[kCodes], v[kCodes];
};

// The cache in global memory, all pages of all heads in a row.
template <int D, int Groups>
struct Pools {
    const unsigned char *k, *v;
    const Params<Groups>*k_params, *v_params;
};

template <int D, int Groups, int TileTokens, int Stages>
struct alignas(16) Ring {
    Stage<D, Groups, TileTokens> stage[Stages];
    u64 arrived[Stages];  // mbarriers, on Hopper
};

#if __CUDA_ARCH__ >= 900
constexpr bool kCopyEngine = true;
#else
constexpr bool kCopyEngine = false;
#endif

// One warp's use of its ring: `fetch` or `fetch_nothing` at the back, `wait` for and `pop` at the front, in turn.
template <int D, int Groups, int TileTokens, int Stages>
struct Reader {
    using Stage = kv::Stage<D, Groups, TileTokens>;
    Ring<D, Groups, TileTokens, Stages>& ring;
    int lane, back = 0, front = 0, parity = 0;

    __device__ __forceinline__ Reader(Ring<D, Groups, TileTokens, Stages>& ring, int lane) : ring(ring), lane(lane) {
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            for (int i = 0; i < Stages; ++i) ptx::mbarrier_init(barrier(i), 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
#endif
    }

    // Start copying a tile from token number `token` of the pools; every lane has read what lay in this stage.
    __device__ __forceinline__ void fetch(const Pools<D, Groups>& pools, long long token) {
        Stage& stage = ring.stage[back];
#if __CUDA_ARCH__ >= 900
        if (lane == 0) ptx::mbarrier_arrive_expect(barrier(back), sizeof(Stage));
#endif
        copy<Stage::kCodes>(stage.k, pools.k + token * (D / 2));
        copy<Stage::kCodes>(stage.v, pools.v + token * (D / 2));
        if constexpr (Groups != kStatic) {
            copy<Stage::kParams>(stage.k_params, pools.k_params + token * Groups);
            copy<Stage::kParams>(stage.v_params, pools.v_params + token * Groups);
        }
        fetch_nothing();
    }

    __device__ __forceinline__ void fetch_nothing() {
        if constexpr (!kCopyEngine) ptx::cp_async_commit();
        back = back + 1 == Stages ? 0 : back + 1;
    }

    // The oldest stage, when Stages - 1 have been started and it has arrived.
    __device__ __forceinline__ const Stage& wait() {
#if __CUDA_ARCH__ >= 900
        ptx::mbarrier_wait(barrier(front), parity);
#else
        ptx::cp_async_wait<Stages - 2>();
#endif
        __syncwarp();  // also: all lanes have done with the stage before, so it may be fetched into
        return ring.stage[front];
    }

    __device__ __forceinline__ void pop() {
        front = front + 1 == Stages ? 0 : front + 1;
        if (front == 0) parity ^= 1;
    }

    // When every tile that was fetched has been waited for: the ring's memory may then serve for something else.
    __device__ __forceinline__ void close() {
#if __CUDA_ARCH__ >= 900
        if (lane == 0)
            for (int i = 0; i < Stages; ++i) ptx::mbarrier_invalidate(barrier(i));
#endif
    }

private:
    __device__ __forceinline__ u32 barrier(int i) const { return ptx::shared_address(&ring.arrived[i]); }

    template <int Bytes>
    __device__ __forceinline__ void copy(void* shared, const void* global) {
        const u32 to = ptx::shared_address(shared);
#if __CUDA_ARCH__ >= 900
        if (lane == 0) ptx::bulk_load(to, global, Bytes, barrier(back));
#else
#pragma unroll
        for (int at = lane * 16; at < Bytes; at += kWarp * 16)
            ptx::cp_async_16(to + at, static_cast<const char*>(global) + at);
#endif
    }
};

}  // namespace kv

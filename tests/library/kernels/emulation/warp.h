// Blocks of warps of 32 lanes on one thread of a CPU: each lane is a coroutine that runs to its next shuffle, where all
// of its warp must meet, or to a barrier, where all of its block must.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <utility>

#include "cuda_fp16.h"

#define __shared__ static

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace warp {

constexpr int LANES = 32, STACK = 256 << 10;

struct Lane {
    ucontext_t context;
    std::unique_ptr<char[]> stack = std::unique_ptr<char[]>(new char[STACK]);
    unsigned thread;
    std::uint64_t said;     // what it gives to a shuffle
    const void* where;      // which one
    bool ended;
};

inline std::deque<Lane> lanes;  // of a block; a context may not move
inline ucontext_t scheduler;
inline int current;
inline std::function<void()> body;
inline const char barrier = 0;  // the place where a block meets

// Until every lane has said its value at the same place of the program; `turn` tells the two halves of a shuffle apart.
inline void meet(const void* where) {
    lanes[current].where = where;
    swapcontext(&lanes[current].context, &scheduler);
}

inline void enter() {
    body();
    lanes[current].ended = true;
    lanes[current].where = nullptr;
    swapcontext(&lanes[current].context, &scheduler);
}

// The lanes of a warp to their next meeting. A shuffle that some lanes do not reach is an error on a GPU, and here.
inline void step(unsigned first) {
    for (unsigned i = first; i < first + LANES; ++i) {
        current = static_cast<int>(i), threadIdx.x = lanes[i].thread;
        swapcontext(&scheduler, &lanes[i].context);
    }
    for (unsigned i = first; i < first + LANES; ++i) {
        if (lanes[i].where != lanes[first].where || lanes[i].ended != lanes[first].ended) {
            std::fputs("lanes of a warp are at different shuffles\n", stderr);
            std::abort();
        }
    }
}

// All lanes of a block of whole warps to their ends.
inline void run(unsigned threads) {
    while (lanes.size() < threads) lanes.emplace_back();
    for (unsigned i = 0; i < threads; ++i) {
        Lane& lane = lanes[i];
        lane.thread = i, lane.ended = false, lane.where = nullptr;
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.get();
        lane.context.uc_stack.ss_size = STACK;
        lane.context.uc_link = nullptr;
        makecontext(&lane.context, enter, 0);
    }
    for (bool under_way = true; under_way;) {
        under_way = false;
        for (unsigned first = 0; first < threads; first += LANES) {  // each warp to the block's next barrier
            if (lanes[first].ended) continue;
            do step(first);
            while (!lanes[first].ended && lanes[first].where != &barrier);
            under_way |= !lanes[first].ended;
        }
    }
}

template <class T>
inline T exchange(T x, int from, const void* where) {
    std::uint64_t bits = 0;
    static_assert(sizeof x <= sizeof bits);
    std::memcpy(&bits, &x, sizeof x);
    lanes[current].said = bits;
    meet(where);  // now all have said theirs
    bits = lanes[from].said;
    meet(static_cast<const char*>(where) + 1);  // now all have heard it
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// A grid of a kernel, whose arguments lie as a launch packs them.
template <class... A, std::size_t... I>
inline void launch(void (*kernel)(A...), void** arguments, unsigned blocks, unsigned threads,
                   std::index_sequence<I...>) {
    blockDim.x = threads, gridDim.x = blocks;
    body = [=] { kernel(*static_cast<A*>(arguments[I])...); };
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        run((threads + LANES - 1) / LANES * LANES);
}

template <class... A>
inline void launch(void (*kernel)(A...), void** arguments, unsigned blocks, unsigned threads) {
    launch(kernel, arguments, blocks, threads, std::index_sequence_for<A...>());
}

}  // namespace warp

// A place of the program is the address that the shuffle returns to.
template <class T>
[[gnu::noinline]] T __shfl_xor_sync(unsigned, T x, int mask) {
    return warp::exchange(x, warp::current ^ mask, __builtin_return_address(0));
}
template <class T>
[[gnu::noinline]] T __shfl_sync(unsigned, T x, int source, int width = 32) {
    const int lane = warp::current;
    return warp::exchange(x, (lane & ~(width - 1)) | (source & (width - 1)), __builtin_return_address(0));
}
inline void __syncthreads() { warp::meet(&warp::barrier); }

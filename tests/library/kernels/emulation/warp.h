// Warps of 32 lanes on one thread of a CPU: each lane is a coroutine that runs to its next shuffle, where all must meet.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "cuda_fp16.h"

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace warp {

constexpr int LANES = 32, STACK = 256 << 10;

struct Lane {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK);
    unsigned thread;
    std::uint64_t said;     // what it gives to a shuffle
    const void* where;      // which one
    bool ended;
};

inline Lane lanes[LANES];
inline ucontext_t scheduler;
inline int current;
inline std::function<void()> body;

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

// All lanes of a warp to their ends. A shuffle that some lanes do not reach is an error on a GPU, and here.
inline void run(unsigned first_thread) {
    for (int i = 0; i < LANES; ++i) {
        Lane& lane = lanes[i];
        lane.thread = first_thread + i, lane.ended = false;
        getcontext(&lane.context);
        lane.context.uc_stack.ss_sp = lane.stack.data();
        lane.context.uc_stack.ss_size = lane.stack.size();
        lane.context.uc_link = nullptr;
        makecontext(&lane.context, enter, 0);
    }
    while (!lanes[0].ended) {
        for (current = 0; current < LANES; ++current) {
            threadIdx.x = lanes[current].thread;
            swapcontext(&scheduler, &lanes[current].context);
        }
        for (const Lane& lane : lanes) {
            if (lane.where != lanes[0].where || lane.ended != lanes[0].ended) {
                std::fputs("lanes of a warp are at different shuffles\n", stderr);
                std::abort();
            }
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
        for (unsigned first = 0; first < threads; first += LANES) run(first);
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

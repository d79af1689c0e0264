// What lies between the matrix products of a 16-bit decoder, fused as it is in the quantized one: residual add and
// RMSNorm, SwiGLU, rotary embedding and append to the cache. All are bound by memory. Arithmetic is float32, rounded
// where it is stored. sm_80 and newer.

#include "ptx/instructions.cuh"
#include "values/element.cuh"

namespace {

constexpr int kWarp = 32;
constexpr int kNormVectors = 2;  // of eight values, that a thread of add_rms_norm takes at most

// Eight 16-bit numbers, one load.
template <class T>
struct alignas(16) Eight {
    T x[8];
};

template <class T>
__device__ __forceinline__ Eight<T> load(const T* p) {
    return *reinterpret_cast<const Eight<T>*>(p);
}

template <class T>
__device__ __forceinline__ void store(T* p, const Eight<T>& v) {
    *reinterpret_cast<Eight<T>*>(p) = v;
}

// Sum over a block of whole warps, in every thread.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float partial[kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = lane < static_cast<int>(blockDim.x) / kWarp ? partial[lane] : 0.f;
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, mask);
    return x;
}

}  // namespace

// A block per row of n values, n <= 16 * blockDim.x and a multiple of eight. sum = x + residual, where there is one;
// out = RMSNorm(sum) * gain.
template <class T>
__global__ void __launch_bounds__(1024)
    add_rms_norm(const T* x, const T* residual, const T* gain, float eps, int n, T* sum, T* out) {
    ptx::follow_previous_launch();
    const long long row = static_cast<long long>(blockIdx.x) * n;
    float v[kNormVectors][8];
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
        const int column = 8 * (threadIdx.x + i * blockDim.x);
        if (column >= n) continue;
        Eight<T> a = load(x + row + column);
        if (residual) {
            const Eight<T> b = load(residual + row + column);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                a.x[j] = static_cast<T>(static_cast<float>(a.x[j]) + static_cast<float>(b.x[j]));
            store(sum + row + column, a);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[i][j] = static_cast<float>(a.x[j]);
            squares = fmaf(v[i][j], v[i][j], squares);
        }
    }
    const float factor = rsqrtf(block_sum(squares) / n + eps);
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
        const int column = 8 * (threadIdx.x + i * blockDim.x);
        if (column >= n) continue;
        Eight<T> g, y;
        if (gain) g = load(gain + column);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            y.x[j] = static_cast<T>(v[i][j] * factor * (gain ? static_cast<float>(g.x[j]) : 1.f));
        store(out + row + column, y);
    }
}

// out [rows, n] = silu(gate) * up of (gate | up) [rows, 2 n], silu rounded as torch rounds it; n a multiple of eight.
template <class T>
__global__ void __launch_bounds__(256) swiglu(const T* gate_up, long long vectors, int n, T* out) {
    ptx::follow_previous_launch();
    const long long item = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= vectors) return;
    const long long row = item / (n / 8), column = 8 * (item % (n / 8));
    const Eight<T> gate = load(gate_up + row * 2 * n + column), up = load(gate_up + row * 2 * n + n + column);
    Eight<T> y;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float g = static_cast<float>(gate.x[j]);
        y.x[j] = static_cast<T>(rounded<T>(g / (1.f + __expf(-g))) * static_cast<float>(up.x[j]));
    }
    store(out + row * n + column, y);
}

// Projections (q | k | v) [batch * tokens, (heads + 2 kv_heads) * D]: rotary embedding of q to `queries`, of k into the
// cache, and v into the cache, at positions lengths[b] + t. cos, sin [1 or batch, tokens, D], their halves equal. A
// thread turns eight features of a head's first half with the eight of its second. A text's queries [gap + tokens] begin
// with a gap of zeros.
template <class T>
__global__ void __launch_bounds__(256)
    rope_append(const T* qkv, const T* cos, const T* sin, int cos_batch, const int* lengths, int batch, int gap,
                int tokens, int heads, int kv_heads, int head_dim, int capacity, T* queries, T* keys, T* values) {
    ptx::follow_previous_launch();
    const int all = heads + 2 * kv_heads, half = head_dim / 2;
    const long long item = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int i = 8 * (item % (half / 8)), head = item / (half / 8) % all;
    const long long row = item / (half / 8) / all;
    if (row >= static_cast<long long>(batch) * (gap + tokens)) return;
    const int text = row / (gap + tokens), token = row % (gap + tokens) - gap;
    if (token < 0) {
        if (head >= heads) return;
        T* target = queries + (row * heads + head) * head_dim + i;
        store(target, Eight<T>{});
        store(target + half, Eight<T>{});
        return;
    }
    const T* source = qkv + ((static_cast<long long>(text) * tokens + token) * all + head) * head_dim + i;
    Eight<T> first = load(source), second = load(source + half);
    if (head < heads + kv_heads) {
        const long long angle = (static_cast<long long>(cos_batch == 1 ? 0 : text) * tokens + token) * head_dim + i;
        const Eight<T> c = load(cos + angle), s = load(sin + angle);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float a = static_cast<float>(first.x[j]), b = static_cast<float>(second.x[j]),
                        cj = static_cast<float>(c.x[j]), sj = static_cast<float>(s.x[j]);
            first.x[j] = static_cast<T>(a * cj - b * sj);
            second.x[j] = static_cast<T>(b * cj + a * sj);
        }
    }
    T* target;
    if (head < heads) {
        target = queries + (row * heads + head) * head_dim;
    } else {
        const int position = lengths[text] + token;
        if (position >= capacity) return;
        const bool is_key = head < heads + kv_heads;
        const int kv_head = head - heads - (is_key ? 0 : kv_heads);
        const long long place = static_cast<long long>(text) * capacity + position;
        target = (is_key ? keys : values) + (place * kv_heads + kv_head) * head_dim;
    }
    store(target + i, first);
    store(target + i + half, second);
}

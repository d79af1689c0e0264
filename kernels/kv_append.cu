// Tokens into and out of the 4-bit KV cache: RoPE, Hadamard transform, asymmetric quantization and write (QuaRot Sec. 4,
// stages 1d and 2c); and the dequantization that prefill attention reads. One warp works on one head of one token.
// Quantization is that of rotquant/quantization.py, operation for operation in float32. sm_80 and newer.

#include "kv.cuh"
#include "ptx.cuh"

using namespace kv;

constexpr int WARPS = 8;

// Scale and zero point of Values consecutive 32-element blocks of the vector, from the whole warp.
template <int D, int GROUPS>
struct Quantizer {
    static constexpr int N = D / WARP, PER_GROUP = N / GROUPS;
    float scale[GROUPS], zero[GROUPS];

    __device__ __forceinline__ void choose(const HeadVector<D>& v, float clip) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float low = 0.f, high = 0.f;  // the range includes zero
#pragma unroll
            for (int i = group * PER_GROUP; i < (group + 1) * PER_GROUP; ++i) {
                low = fminf(low, v.x[i]);
                high = fmaxf(high, v.x[i]);
            }
            low = -warp_max(-low);
            high = warp_max(high);
            const float smallest = 1.17549435e-38f;
            scale[group] = fmaxf(__fdiv_rn(__fmul_rn(clip, __fsub_rn(high, low)), 15.f), smallest);
            zero[group] = rintf(__fdiv_rn(__fmul_rn(-clip, low), scale[group]));
        }
    }

    __device__ __forceinline__ int code(const HeadVector<D>& v, int i) const {
        const int group = i / PER_GROUP;
        const float code = rintf(__fdiv_rn(v.x[i], scale[group])) + zero[group];
        return static_cast<int>(fminf(fmaxf(code, 0.f), 15.f));
    }

    // Lane 0 writes; `params` is the token's first pair.
    __device__ __forceinline__ void store(__half2* params, int lane) const {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            if (lane == group) params[group] = __floats2half2_rn(scale[group], zero[group]);
    }
};

// A warp per (sequence, token, head), keys and values in turn along blockIdx.y. Strides are in elements.
template <typename T, int D, int GROUPS>
__global__ void __launch_bounds__(WARPS * WARP)
    kv_append(const T* k, const T* v, long long k_batch, long long k_token, long long v_batch, long long v_token,
              const T* cos, const T* sin, int cos_batch, unsigned char* k_codes, unsigned char* v_codes,
              __half2* k_params, __half2* v_params, const int* starts, const int* table, int pages, int per_sequence,
              int page_size, int batch, int tokens, int kv_heads, int rotate, float clip_k, float clip_v) {
    const int lane = threadIdx.x % WARP;
    const long long item = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (item >= static_cast<long long>(batch) * tokens * kv_heads) return;
    const int head = item % kv_heads, token = item / kv_heads % tokens, sequence = item / kv_heads / tokens;
    const Pages book{table, pages, per_sequence, page_size};
    const int position = starts[sequence] + token;
    if (position < 0 || position >= book.capacity()) return;
    const long long plane = static_cast<long long>(book.number(sequence, position / page_size)) * kv_heads + head;
    const int slot = position % page_size;
    const long long bytes = plane * page_size * (D / 2);
    const long long params = (plane * page_size + slot) * GROUPS;
    HeadVector<D> x;
    Quantizer<D, GROUPS> quantizer;
    if (blockIdx.y == 0) {
        x.load(k + sequence * k_batch + token * k_token + head * D, lane);
        if (cos != nullptr) {
            const int row = (sequence * cos_batch + token) * D;
            x.template rope<T>(cos + row, sin + row, lane);
        }
        if (rotate) {
            x.hadamard(lane);
            x.template round<T>();
        }
        quantizer.choose(x, clip_k);
#pragma unroll
        for (int i = 0; i < D / WARP; ++i) {
            const int code = quantizer.code(x, i);
            const int next = __shfl_xor_sync(ALL_LANES, code, 1);
            if (lane % 2 == 0) k_codes[bytes + key_byte<D>(slot, WARP * i + lane)] = code | next << 4;
        }
        quantizer.store(k_params + params, lane);
    } else {
        x.load(v + sequence * v_batch + token * v_token + head * D, lane);
        quantizer.choose(x, clip_v);
#pragma unroll
        for (int i = 0; i < D / WARP; ++i) {
            const int code = quantizer.code(x, i);
            const int next = __shfl_xor_sync(ALL_LANES, code, 8);
            if (lane % 16 < 8) v_codes[bytes + value_byte<D>(slot, WARP * i + lane)] = code | next << 4;
        }
        quantizer.store(v_params + params, lane);
    }
}

// RoPE and Hadamard transform of x [batch, tokens, heads, D] into a contiguous tensor: prefill's queries.
template <typename T, int D>
__global__ void __launch_bounds__(WARPS * WARP)
    kv_rotate(const T* x, long long x_batch, long long x_token, const T* cos, const T* sin, int cos_batch, T* out,
              int batch, int tokens, int heads, int rotate) {
    const int lane = threadIdx.x % WARP;
    const long long item = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / WARP;
    if (item >= static_cast<long long>(batch) * tokens * heads) return;
    const int head = item % heads, token = item / heads % tokens, sequence = item / heads / tokens;
    HeadVector<D> v;
    v.load(x + sequence * x_batch + token * x_token + head * D, lane);
    if (cos != nullptr) {
        const int row = (sequence * cos_batch + token) * D;
        v.template rope<T>(cos + row, sin + row, lane);
    }
    if (rotate) v.hadamard(lane);
#pragma unroll
    for (int i = 0; i < D / WARP; ++i) out[item * D + lane + WARP * i] = from_float<T>(v.x[i]);
}

// (code - zero) * scale of the first `tokens` tokens, [batch, kv_heads, tokens, D]: a warp per 16 tokens of a head,
// keys and values in turn along blockIdx.y. Values cross shared memory, because a lane reads few tokens' bytes of each d.
template <typename T, int D, int GROUPS>
__global__ void __launch_bounds__(WARPS * WARP)
    kv_dequantize(const unsigned char* k_codes, const unsigned char* v_codes, const __half2* k_params,
                  const __half2* v_params, const int* table, int pages, int per_sequence, int page_size, int batch,
                  int tokens, int kv_heads, T* k, T* v) {
    constexpr int GROUP = D / GROUPS, ROW = D + 8;  // 16 bytes of padding: rows start in different banks
    __shared__ __align__(16) T staged[WARPS][16][ROW];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    const int blocks = (tokens + 15) / 16;
    const long long item = static_cast<long long>(blockIdx.x) * WARPS + warp;
    if (item >= static_cast<long long>(batch) * kv_heads * blocks) return;
    const int first = item % blocks * 16, head = item / blocks % kv_heads, sequence = item / blocks / kv_heads;
    const Pages book{table, pages, per_sequence, page_size};
    const long long plane = static_cast<long long>(book.number(sequence, first / page_size)) * kv_heads + head;
    const int slot = first % page_size;
    const bool values = blockIdx.y;
    const unsigned* codes =
        reinterpret_cast<const unsigned*>((values ? v_codes : k_codes) + (plane * page_size + slot) * (D / 2));
    const __half2* params = (values ? v_params : k_params) + (plane * page_size + slot) * GROUPS;
    auto value = [&](int token, int d, unsigned code) {
        const float2 p = __half22float2(params[token * GROUPS + d / GROUP]);
        return from_float<T>((static_cast<float>(code & 15) - p.y) * p.x);
    };
    auto& rows = staged[warp];
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        if (values) {
            const unsigned word = codes[i / 4 * 128 + lane * 4 + i % 4];
#pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
                const int token = 2 * t + byte / 2 + 8 * (byte % 2), d = 16 * i + g;
                rows[token][d] = value(token, d, word >> (8 * byte));
                rows[token][d + 8] = value(token, d + 8, word >> (8 * byte + 4));
            }
        } else {
            const int token = g + 8 * (i % 2), d = 32 * (i / 2) + 8 * t;
            const unsigned word = codes[token * (D / 8) + t * (D / 32) + i / 2];
#pragma unroll
            for (int e = 0; e < 8; ++e) rows[token][d + e] = value(token, d + e, word >> (4 * e));
        }
    }
    __syncwarp();
    T* out = (values ? v : k) + ((static_cast<long long>(sequence) * kv_heads + head) * tokens + first) * D;
    constexpr int PIECES = D / 8;  // of 16 bytes
#pragma unroll
    for (int i = 0; i < 16 * PIECES / WARP; ++i) {
        const int token = (i * WARP + lane) / PIECES, d = (i * WARP + lane) % PIECES * 8;
        if (first + token < tokens)
            *reinterpret_cast<uint4*>(out + token * D + d) = *reinterpret_cast<const uint4*>(&rows[token][d]);
    }
}

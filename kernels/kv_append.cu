// Tokens into and out of the 4-bit KV cache: RoPE, Hadamard transform, quantization and write (QuaRot Sec. 4, stages 1d
// and 2c), asymmetric with scales found for each token or symmetric with the head's static one (PrefixQuant); and the
// dequantization that prefill attention reads. One warp works on one head of a token. Quantization is that of
// rotquant/tensors/quantization.py, operation for operation in float32. sm_80 and newer.

#include "kv/head.cuh"
#include "ptx/instructions.cuh"

using namespace kv;

constexpr int kWarps = 8;

// Scales and zero points of a vector, known to the whole warp.
template <int D, int Groups>
struct Quantizer {
    static constexpr int kN = D / kWarp, kPerGroup = kN / kScales<Groups>;
    float scale[kScales<Groups>], zero[kScales<Groups>];

    // The head's static scale; symmetric codes are stored with the zero point that makes them positive.
    __device__ __forceinline__ void take(float known) { scale[0] = known, zero[0] = kStaticZero; }

    __device__ __forceinline__ void choose(const HeadVector<D>& v, float clip) {
#pragma unroll
        for (int group = 0; group < Groups; ++group) {
            float low = 0.f, high = 0.f;  // the range includes zero
#pragma unroll
            for (int i = group * kPerGroup; i < (group + 1) * kPerGroup; ++i) {
                low = fminf(low, v.x[i]);
                high = fmaxf(high, v.x[i]);
            }
            low = -warp_reduce<Maximum>(-low);
            high = warp_reduce<Maximum>(high);
            const float smallest = 1.17549435e-38f;
            scale[group] = fmaxf(__fdiv_rn(__fmul_rn(clip, __fsub_rn(high, low)), 15.f), smallest);
            zero[group] = rintf(__fdiv_rn(__fmul_rn(-clip, low), scale[group]));
        }
    }

    __device__ __forceinline__ int code(const HeadVector<D>& v, int i) const {
        const int group = i / kPerGroup;
        const float code = rintf(__fdiv_rn(v.x[i], scale[group])) + zero[group];
        return static_cast<int>(fminf(fmaxf(code, 0.f), 15.f));
    }

    __device__ __forceinline__ __half2 pair(int group) const { return __floats2half2_rn(scale[group], zero[group]); }
};

// New tokens [batch, tokens, kv_heads, D] with strides in elements, and how they are stored.
template <class T, int D>
struct Tokens {
    const T* x;
    long long batch_stride, token_stride;
    const T *cos, *sin;  // null for values, and for keys without RoPE
    int cos_batch;       // rows of angles from one sequence to the next
    bool rotate;
    float clip;

    // One head of one token, as its codes and parameters are computed from it.
    __device__ __forceinline__ HeadVector<D> load(int sequence, int token, int head, int lane) const {
        HeadVector<D> v;
        v.load(x + sequence * batch_stride + token * token_stride + head * D, lane);
        if (cos != nullptr) {
            const int row = (sequence * cos_batch + token) * D;
            v.template rope<T>(cos + row, sin + row, lane);
        }
        if (rotate) {
            v.hadamard(lane);
            v.template round<T>();
        }
        return v;
    }
};

// Quantize one head of one token by a clip ratio, or a static scale; `codes` is a page, or 16 tokens, of which this is
// number `slot`.
template <bool Values, int D, int Groups>
__device__ __forceinline__ void store(const HeadVector<D>& v, float clip_or_scale, unsigned char* codes,
                                      Params<Groups>* params, int slot, int lane) {
    Quantizer<D, Groups> quantizer;
    if constexpr (Groups == kStatic)
        quantizer.take(clip_or_scale);
    else
        quantizer.choose(v, clip_or_scale);
#pragma unroll
    for (int i = 0; i < D / kWarp; ++i) {
        const int code = quantizer.code(v, i), d = kWarp * i + lane;
        const int partner = __shfl_xor_sync(kAllLanes, code, Values ? 8 : 1);
        if ((lane & (Values ? 8 : 1)) == 0)
            codes[Values ? value_byte<D>(slot, d) : key_byte<D>(slot, d)] = code | partner << 4;
    }
    if constexpr (Groups != kStatic) {
#pragma unroll
        for (int group = 0; group < Groups; ++group)
            if (lane == group) params[slot * Groups + group] = quantizer.pair(group);
    }
}

// What `store` takes: the clip ratio, or a head's static scale.
template <int Groups>
__device__ __forceinline__ float clip_or_scale(float clip, const Params<Groups>* params, int head) {
    if constexpr (Groups == kStatic)
        return params[head];
    else
        return clip;
}

// Decode: a warp per (sequence, token, head).
template <bool Values, class T, int D, int Groups>
__device__ __forceinline__ void append_token(const Tokens<T, D>& in, unsigned char* codes, Params<Groups>* params,
                                             const int* starts, const Pages& book, int batch, int tokens,
                                             int kv_heads) {
    const int lane = threadIdx.x % kWarp;
    const long long item = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (item >= static_cast<long long>(batch) * tokens * kv_heads) return;
    const int head = item % kv_heads, token = item / kv_heads % tokens, sequence = item / kv_heads / tokens;
    const float how = clip_or_scale<Groups>(in.clip, params, head);
    const HeadVector<D> v = in.load(sequence, token, head, lane);
    const int position = starts[sequence] + token;
    if (position < 0 || position >= book.capacity()) return;
    const long long first = book.plane(sequence, position, head, kv_heads) * book.size;
    store<Values, D, Groups>(v, how, codes + first * (D / 2), params + first * Groups, position % book.size, lane);
}

// Prefill: a block per 16 consecutive positions of a head, so that the bytes of values, of which a token's lie apart,
// meet in shared memory and leave in one piece.
template <bool Values, class T, int D, int Groups>
__device__ __forceinline__ void append_block(const Tokens<T, D>& in, unsigned char* codes, Params<Groups>* params,
                                             const int* starts, const Pages& book, int tokens, int kv_heads) {
    constexpr int kBytes = 16 * D / 2;
    __shared__ __align__(16) unsigned char staged[kBytes];
    __shared__ Params<Groups> staged_params[16 * kScales<Groups>];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int blocks = (tokens + 15) / 16 + 1;  // one more, because the first position need not be a multiple of 16
    const int head = blockIdx.x % kv_heads, sequence = blockIdx.x / kv_heads / blocks;
    const int start = starts[sequence], position = start / 16 * 16 + blockIdx.x / kv_heads % blocks * 16;
    if (start < 0 || position >= start + tokens || position >= book.capacity()) return;
    const float how = clip_or_scale<Groups>(in.clip, params, head);
    for (int slot = warp; slot < 16; slot += kWarps) {
        const int token = position + slot - start;
        if (token >= 0 && token < tokens)
            store<Values, D, Groups>(in.load(sequence, token, head, lane), how, staged, staged_params, slot, lane);
    }
    __syncthreads();
    const long long first = book.plane(sequence, position, head, kv_heads) * book.size + position % book.size;
    codes += first * (D / 2);
    params += first * Groups;
    const int low = start - position, high = start + tokens - position;  // slots that are new: low .. high - 1
    if constexpr (Groups != kStatic) {
        for (int at = threadIdx.x; at < 16 * Groups; at += kWarps * kWarp)
            if (at / Groups >= low && at / Groups < high) params[at] = staged_params[at];
    }
    if (low <= 0 && high >= 16) {
        for (int at = threadIdx.x * 16; at < kBytes; at += kWarps * kWarp * 16)
            *reinterpret_cast<uint4*>(codes + at) = *reinterpret_cast<const uint4*>(staged + at);
    } else {
        for (int at = threadIdx.x; at < kBytes; at += kWarps * kWarp) {
            const int slot = Values ? at / 16 % 4 * 2 + at % 4 / 2 + at % 2 * 8 : at / (D / 2);
            if (slot >= low && slot < high) codes[at] = staged[at];
        }
    }
}

// Keys (blockIdx.y 0) and values (1). Blocked: 16 positions of a head per block of threads, else a token per warp.
template <class T, int D, int Groups, bool Blocked>
__global__ void __launch_bounds__(kWarps* kWarp)
    kv_append(const T* k, const T* v, long long k_batch, long long k_token, long long v_batch, long long v_token,
              const T* cos, const T* sin, int cos_batch, unsigned char* k_codes, unsigned char* v_codes,
              Params<Groups>* k_params, Params<Groups>* v_params, const int* starts, const int* table, int pages,
              int per_sequence, int page_size, int batch, int tokens, int kv_heads, int rotate, float clip_k,
              float clip_v) {
    ptx::follow_previous_launch();
    const Pages book{table, pages, per_sequence, page_size};
    const Tokens<T, D> keys{k, k_batch, k_token, cos, sin, cos_batch, rotate != 0, clip_k};
    const Tokens<T, D> values{v, v_batch, v_token, nullptr, nullptr, 0, false, clip_v};
    if constexpr (Blocked) {
        if (blockIdx.y == 0)
            append_block<false, T, D, Groups>(keys, k_codes, k_params, starts, book, tokens, kv_heads);
        else
            append_block<true, T, D, Groups>(values, v_codes, v_params, starts, book, tokens, kv_heads);
    } else {
        if (blockIdx.y == 0)
            append_token<false, T, D, Groups>(keys, k_codes, k_params, starts, book, batch, tokens, kv_heads);
        else
            append_token<true, T, D, Groups>(values, v_codes, v_params, starts, book, batch, tokens, kv_heads);
    }
}

// RoPE and Hadamard transform of x [batch, tokens, heads, D] into out [batch, gap + tokens, heads, D], zeros in the gap:
// prefill's queries.
template <class T, int D>
__global__ void __launch_bounds__(kWarps* kWarp)
    kv_rotate(const T* x, long long x_batch, long long x_token, const T* cos, const T* sin, int cos_batch, T* out,
              int batch, int gap, int tokens, int heads, int rotate) {
    const int lane = threadIdx.x % kWarp, rows = gap + tokens;
    const long long item = static_cast<long long>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    if (item >= static_cast<long long>(batch) * rows * heads) return;
    const int head = item % heads, token = item / heads % rows - gap, sequence = item / heads / rows;
    HeadVector<D> v{};
    if (token >= 0) {
        v.load(x + sequence * x_batch + token * x_token + head * D, lane);
        if (cos != nullptr) {
            const int row = (sequence * cos_batch + token) * D;
            v.template rope<T>(cos + row, sin + row, lane);
        }
        if (rotate) v.hadamard(lane);
    }
#pragma unroll
    for (int i = 0; i < D / kWarp; ++i) out[item * D + lane + kWarp * i] = static_cast<T>(v.x[i]);
}

// (code - zero) * scale of the first `tokens` tokens, [batch, kv_heads, tokens, D], behind the `prefix` tokens that are
// those of k_prefix and v_prefix [kv_heads, prefix, D]: a warp per 16 tokens of a head, keys and values in turn along
// blockIdx.y. They cross shared memory, because a lane reads few tokens' bytes of each d.
template <class T, int D, int Groups>
__global__ void __launch_bounds__(kWarps* kWarp)
    kv_dequantize(const unsigned char* k_codes, const unsigned char* v_codes, const Params<Groups>* k_params,
                  const Params<Groups>* v_params, const T* k_prefix, const T* v_prefix, int prefix, const int* table,
                  int pages, int per_sequence, int page_size, int batch, int tokens, int kv_heads, T* k, T* v) {
    constexpr int kGroup = D / kScales<Groups>, kRow = D + 8;  // 16 bytes of padding: rows start in different banks
    __shared__ __align__(16) T staged[kWarps][16][kRow];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
    const int blocks = (tokens + 15) / 16;
    const long long item = static_cast<long long>(blockIdx.x) * kWarps + warp;
    if (item >= static_cast<long long>(batch) * kv_heads * blocks) return;
    const int first = item % blocks * 16, head = item / blocks % kv_heads, sequence = item / blocks / kv_heads;
    const Pages book{table, pages, per_sequence, page_size};
    const long long plane = book.plane(sequence, first, head, kv_heads);
    const int slot = first % page_size;
    const bool values = blockIdx.y;
    const u32* codes =
        reinterpret_cast<const u32*>((values ? v_codes : k_codes) + (plane * page_size + slot) * (D / 2));
    const Params<Groups>* params = (values ? v_params : k_params) + (plane * page_size + slot) * Groups;
    float2 p = make_float2(0.f, kStaticZero);
    if constexpr (Groups == kStatic) p.x = params[head];
    auto value = [&](int token, int d, u32 code) {
        if constexpr (Groups != kStatic) p = __half22float2(params[token * Groups + d / kGroup]);
        return static_cast<T>((static_cast<float>(code & 15) - p.y) * p.x);
    };
    auto& rows = staged[warp];
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        if (values) {
            const u32 word = codes[i / 4 * 128 + lane * 4 + i % 4];
#pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
                const int token = 2 * t + byte / 2 + 8 * (byte % 2), d = 16 * i + g;
                rows[token][d] = value(token, d, word >> (8 * byte));
                rows[token][d + 8] = value(token, d + 8, word >> (8 * byte + 4));
            }
        } else {
            const int token = g + 8 * (i % 2), d = 32 * (i / 2) + 8 * t;
            const u32 word = codes[token * (D / 8) + t * (D / 32) + i / 2];
#pragma unroll
            for (int e = 0; e < 8; ++e) rows[token][d + e] = value(token, d + e, word >> (4 * e));
        }
    }
    __syncwarp();
    T* out = (values ? v : k) + ((static_cast<long long>(sequence) * kv_heads + head) * tokens + first) * D;
    const T* fixed = (values ? v_prefix : k_prefix) + (static_cast<long long>(head) * prefix + first) * D;
    constexpr int kPieces = D / 8;  // of 16 bytes
#pragma unroll
    for (int i = 0; i < 16 * kPieces / kWarp; ++i) {
        const int token = (i * kWarp + lane) / kPieces, d = (i * kWarp + lane) % kPieces * 8;
        const T* from = first + token < prefix ? fixed + token * D + d : &rows[token][d];
        if (first + token < tokens)
            *reinterpret_cast<uint4*>(out + token * D + d) = *reinterpret_cast<const uint4*>(from);
    }
}

// W4A4 and W4A8 matrix product with mma.sync (sm_80, sm_86, sm_89; correct, and slower than gemm_sm90.cu, on Hopper).
// int8 activations meet weights unpacked in registers (m16n8k32 on int8); packed 4-bit activations meet weights as they
// lie in memory (m16n8k64 on int4, native on these architectures). Exact int32 sums, scales applied once at the end, or
// once per group of 128 along K (QuaRot Sec. 4, stage 2a, App. A.10).
//
// The product is computed transposed, out[feature, token], as packed weights are in the order of first operands. A
// block holds 128 features by 128 tokens, a warp 32 by 64; a ring of shared-memory stages, 64 of K each, fills by
// cp.async.

#include "gemm/problem.cuh"
#include "mma/warp.cuh"

constexpr int kThreads = 256;
constexpr int kStages = 4;
constexpr int kFeatures = 128, kTokens = 128;     // of a block
constexpr int kWarpStrips = 2, kWarpTokens = 64;  // of a warp: strips of 16 features
constexpr int kColumns = kWarpTokens / 8;
constexpr int kStripBytes = 512;  // 16 features, 64 of K
constexpr int kWeightBytes = kFeatures / 16 * kStripBytes;

template <bool Packed>
constexpr int kRowBytes = Packed ? 32 : 64;  // one token's codes in a stage
template <bool Packed>
constexpr int kStageBytes = kWeightBytes + kTokens * kRowBytes<Packed>;

// Where 16 bytes of a token's codes lie: eight rows read together touch all banks once.
template <bool Packed>
__device__ __forceinline__ u32 code_offset(int row, int chunk) {
    const int swizzled = Packed ? chunk ^ (row >> 2 & 1) : chunk ^ (row >> 1 & 3);
    return row * kRowBytes<Packed> + swizzled * 16;
}

template <bool Packed>
__device__ __forceinline__ void load_stage(u32 stage, const uint4* weight, const unsigned char* codes, const Problem& p,
                                           Tile tile, int step) {
    const int strip = tile.feature * (kFeatures / 16) + threadIdx.x / 32;
    const bool has_strip = strip * 16 < p.features;
    const long long at = has_strip ? (static_cast<long long>(strip) * p.k_steps + step) * 32 + threadIdx.x % 32 : 0;
    ptx::cp_async_16(stage + threadIdx.x * 16, weight + at, has_strip);
    constexpr int kChunks = kRowBytes<Packed> / 16;
    const long long pitch = static_cast<long long>(p.k_steps) * kRowBytes<Packed>;
#pragma unroll
    for (int i = threadIdx.x; i < kTokens * kChunks; i += kThreads) {
        const int row = i / kChunks, chunk = i % kChunks, token = tile.token * kTokens + row;
        const bool valid = token < p.rows;
        const unsigned char* from = codes + (valid ? token * pitch + step * kRowBytes<Packed> + chunk * 16 : 0);
        ptx::cp_async_16(stage + kWeightBytes + code_offset<Packed>(row, chunk), from, valid);
    }
}

using Sums = int[kWarpStrips][kColumns][4];

// One stage on int8: eight tokens by 64 of K are the second operands of two instructions.
__device__ __forceinline__ void multiply_s8(Sums& sums, u32 weights, u32 codes, int row) {
    const int lane = threadIdx.x % 32;
    u32 a[kWarpStrips][2][4];
#pragma unroll
    for (int m = 0; m < kWarpStrips; ++m) {
        u32 words[4];
        ptx::load_shared_16(words, weights + m * kStripBytes + lane * 16);
        unpack_weights(a[m][0], words[0], words[1]);
        unpack_weights(a[m][1], words[2], words[3]);
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
        u32 b[4];
        ptx::ldmatrix_x4(b, codes + code_offset<false>(row + 8 * n + lane % 8, lane / 8));
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < kWarpStrips; ++m) ptx::mma_m16n8k32_s8(sums[m][n], a[m][i], b[2 * i], b[2 * i + 1]);
    }
}

// One stage on int4: a word of `pack_rows` order is an operand register as it is, on both sides.
__device__ __forceinline__ void multiply_s4(Sums& sums, u32 weights, u32 codes, int row) {
    const int lane = threadIdx.x % 32;
    u32 a[kWarpStrips][4];
#pragma unroll
    for (int m = 0; m < kWarpStrips; ++m) ptx::load_shared_16(a[m], weights + m * kStripBytes + lane * 16);
#pragma unroll
    for (int n = 0; n < kColumns; n += 2) {
        u32 b[4];
        ptx::ldmatrix_x4(b, codes + code_offset<true>(row + 8 * (n + lane / 16) + lane % 8, lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int m = 0; m < kWarpStrips; ++m) ptx::mma_m16n8k64_s4(sums[m][n + i], a[m], b[2 * i], b[2 * i + 1]);
    }
}

// Group `group` is complete: add its sums, scaled, and start anew.
template <bool Packed>
__device__ __forceinline__ void fold(float (&values)[kWarpStrips][kColumns][4], Sums& sums, const Problem& p,
                                     int feature, int group, int groups) {
#pragma unroll
    for (int m = 0; m < kWarpStrips; ++m) {
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = feature + 16 * m + 8 * h;
            scale[h] = own < p.features ? p.column_scale[static_cast<long long>(own) * groups + group] : 0.f;
        }
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[m][n][i] = __fmaf_rn(__int2float_rn(sums[m][n][i]), scale[i / 2], values[m][n][i]);
                sums[m][n][i] = 0;
            }
    }
}

// Two 16-bit values of one token and neighbouring features.
__device__ __forceinline__ void store_pair(const Problem& p, int token, int feature, u32 pair) {
    if (token >= p.rows || feature >= p.features) return;
    unsigned short* at =
        static_cast<unsigned short*>(p.out) + static_cast<long long>(token) * p.features + feature;
    if (p.features % 2 == 0) {
        *reinterpret_cast<u32*>(at) = pair;
    } else {
        at[0] = static_cast<unsigned short>(pair);
        if (feature + 1 < p.features) at[1] = static_cast<unsigned short>(pair >> 16);
    }
}

// Scale, add the bias, write; lane 4 g + t holds features g and g + 8 of a strip, tokens 2 t and 2 t + 1 of a column.
template <bool Packed, bool Grouped, class T>
__device__ __forceinline__ void write(const T (&sums)[kWarpStrips][kColumns][4], const Problem& p, int token,
                                      int feature) {
    constexpr float kUnit = Packed ? 1.f : 0.0625f;  // unpacked weights are 16 times too large
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < kWarpStrips; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int strip = feature + 16 * m + 8 * h, own = strip + g;
            const float column = Grouped || own >= p.features ? 1.f : p.column_scale[own];
            const float bias = bias_at(p, own);
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                float y[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int at = token + 8 * n + 2 * t + i;
                    const float row = kUnit * p.row_scale[min(at, p.rows - 1) * p.row_scale_stride];
                    y[i] = __fmul_rn(__fmul_rn(static_cast<float>(sums[m][n][2 * h + i]), row), column);
                    if (p.bias != nullptr) y[i] = __fadd_rn(y[i], bias);
                    if (p.dtype == kFloat32 && at < p.rows && own < p.features)
                        static_cast<float*>(p.out)[static_cast<long long>(at) * p.features + own] = y[i];
                }
                if (p.dtype != kFloat32)
                    store_pair(p, token + 8 * n + g, strip + 2 * t,
                               ptx::movmatrix_trans(pack_pair(y[0], y[1], p.dtype)));
            }
        }
}

template <bool Packed, bool Grouped>
__global__ void __launch_bounds__(kThreads, Grouped ? 1 : 2)
    w4_gemm_mma(const uint4* weight, const unsigned char* codes, const __grid_constant__ Problem p) {
    extern __shared__ __align__(128) unsigned char memory[];
    const u32 shared = ptx::shared_address(memory);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const Tile tile = tile_at(blockIdx.x, (p.rows + kTokens - 1) / kTokens, (p.features + kFeatures - 1) / kFeatures);
    const int strip = warp / 2 * kWarpStrips, row = warp % 2 * kWarpTokens;
    const int feature = tile.feature * kFeatures + strip * 16;

#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) {
        if (step < p.k_steps) load_stage<Packed>(shared + step * kStageBytes<Packed>, weight, codes, p, tile, step);
        ptx::cp_async_commit();
    }
    Sums sums = {};
    float values[kWarpStrips][kColumns][4] = {};
    for (int step = 0; step < p.k_steps; ++step) {
        ptx::cp_async_wait<kStages - 2>();
        __syncthreads();
        const int next = step + kStages - 1;
        if (next < p.k_steps)
            load_stage<Packed>(shared + next % kStages * kStageBytes<Packed>, weight, codes, p, tile, next);
        ptx::cp_async_commit();
        const u32 weights = shared + step % kStages * kStageBytes<Packed> + strip * kStripBytes;
        const u32 stage_codes = shared + step % kStages * kStageBytes<Packed> + kWeightBytes;
        if constexpr (Packed) {
            multiply_s4(sums, weights, stage_codes, row);
        } else {
            multiply_s8(sums, weights, stage_codes, row);
        }
        if constexpr (Grouped) {
            if (step % 2 == 1) fold<Packed>(values, sums, p, feature + g, step / 2, p.k_steps / 2);
        }
    }
    if constexpr (Grouped) {
        write<Packed, Grouped>(values, p, tile.token * kTokens + row, feature);
    } else {
        write<Packed, Grouped>(sums, p, tile.token * kTokens + row, feature);
    }
}

// From int32 sums in the registers of Hopper's warpgroup instructions to scaled results in global memory (sm_90a). A
// warpgroup works on 64 features by Tokens tokens at a time, beside the others.
#pragma once

#include <cuda/std/type_traits>

#include "gemm/problem.cuh"

constexpr int kWarpgroup = 128;
constexpr int kChunk = 64;  // tokens that leave through the copy engine at a time

template <auto Value>
using Constant = cuda::std::integral_constant<decltype(Value), Value>;

// Fetch the scales of a tile into the warpgroup's shared memory; they arrive while it multiplies.
template <int Strips, int Tokens, bool Grouped>
__device__ __forceinline__ void fetch_scales(u32 scales, const Problem& p, int token, int feature) {
    for (int i = threadIdx.x % kWarpgroup; i < Tokens; i += kWarpgroup) {
        const bool valid = token + i < p.rows;
        ptx::cp_async_4(scales + 4 * i, p.row_scale + (valid ? (token + i) * p.row_scale_stride : 0), valid);
    }
    const int i = threadIdx.x % kWarpgroup;
    if (!Grouped && i < Strips * 64) {
        const bool valid = feature + i < p.features;
        ptx::cp_async_4(scales + 4 * (Tokens + i), p.column_scale + (valid ? feature + i : 0), valid);
    }
    ptx::cp_async_commit();
}

// Scales and biases of one thread's two features; `column` contains the 1/16 that sums are too large by.
struct Scaling {
    float column[2], bias[2];

    // `column_scale` null: the sums contain it.
    __device__ __forceinline__ Scaling(const float* column_scale, const Problem& p, int feature) {
        const int own = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            column[h] = 0.0625f * (column_scale == nullptr ? 1.f : column_scale[own + 8 * h]);
            bias[h] = bias_at(p, feature + own + 8 * h);
        }
    }
    // Row scale first, each product rounded: sixteenths are exact, so this is the order of the definition.
    template <bool Bias, class T>
    __device__ __forceinline__ float value(T sum, float row, int h) const {
        const float y = __fmul_rn(__fmul_rn(static_cast<float>(sum), row), column[h]);
        return Bias ? __fadd_rn(y, bias[h]) : y;
    }
};

// Write 64 features by Tokens tokens of a 16-bit output in chunks: transposed on the way to shared memory, from there
// by the copy engine. Two buffers take turns, of which `chunk` counts the uses.
template <int Tokens, int Type, bool Bias, class T>
__device__ __forceinline__ void write_staged(const T (&sums)[Tokens / 2], const float* row_scale,
                                             const Scaling& scaling, u32 staging, int& chunk, const Problem& p,
                                             const ptx::TensorMap& out, int token, int feature, int barrier) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    // Lane l addresses row l % 8 (a token) of the 8x8 matrix l / 8: features h = l / 8 % 2, tokens 8 (j + l / 16).
    const u32 row = (8 * (lane / 16) + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
#pragma unroll
    for (int first = 0; first < Tokens / 8; first += kChunk / 8, ++chunk) {
        const u32 buffer = staging + chunk % 2 * (kChunk * 128);
        if (leader) ptx::tma_store_wait_read<1>();
        ptx::named_barrier<kWarpgroup>(barrier);
#pragma unroll
        for (int j = 0; j < kChunk / 8; j += 2) {
            u32 words[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 scale = *reinterpret_cast<const float2*>(row_scale + 8 * (first + j + n) + lane % 4 * 2);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int at = 4 * (first + j + n) + 2 * h;
                    words[2 * n + h] = pack_pair(scaling.value<Bias>(sums[at], scale.x, h),
                                                 scaling.value<Bias>(sums[at + 1], scale.y, h), Type);
                }
            }
            ptx::stmatrix_x4_trans(buffer + row + 8 * j * 128, words[0], words[1], words[2], words[3]);
        }
        ptx::fence_async_shared();
        ptx::named_barrier<kWarpgroup>(barrier);
        if (leader) {
            if (feature < p.features && token + 8 * first < p.rows) {
                ptx::tma_store_2d(out, buffer, feature, token + 8 * first);
            }
            ptx::tma_store_commit();  // also when empty: the wait above counts groups
        }
    }
}

// The same for any output, element by element.
template <int Tokens, class T>
__device__ __forceinline__ void write_direct(const T (&sums)[Tokens / 2], const float* row_scale,
                                             const Scaling& scaling, const Problem& p, int token, int feature) {
    const int lane = threadIdx.x % 32, own = feature + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int size = p.dtype == kFloat32 ? 4 : 2;
    const long long pitch = static_cast<long long>(p.features) * size;
    token += lane % 4 * 2;
    row_scale += lane % 4 * 2;
    unsigned char* at = static_cast<unsigned char*>(p.out) + token * pitch + static_cast<long long>(own) * size;
#pragma unroll
    for (int j = 0; j < Tokens / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (token + i < p.rows && own + 8 * h < p.features) {
                    const float value = scaling.value<true>(sums[4 * j + 2 * h + i], row_scale[i], h);
                    store_float(at + i * pitch + 8 * h * size, 0, value, p.dtype);
                }
            }
        }
        at += 8 * pitch, token += 8, row_scale += 8;
        asm volatile("" : "+l"(at), "+r"(token), "+l"(row_scale));  // else all addresses are computed first, and spill
    }
}

// 64 features of a tile, the way that its output's type and rows allow. `barrier` is the warpgroup's.
template <int Tokens, class T>
__device__ __forceinline__ void write(const T (&sums)[Tokens / 2], const float* row_scale, const Scaling& scaling,
                                      u32 staging, int& chunk, const Problem& p, const ptx::TensorMap& out, int token,
                                      int feature, int barrier) {
    auto staged = [&](auto type, auto bias) {
        write_staged<Tokens, type.value, bias.value>(sums, row_scale, scaling, staging, chunk, p, out, token, feature,
                                                     barrier);
    };
    if (!p.tensor_store) {
        write_direct<Tokens>(sums, row_scale, scaling, p, token, feature);
    } else if (p.dtype == kFloat16) {
        p.bias == nullptr ? staged(Constant<kFloat16>{}, Constant<false>{})
                          : staged(Constant<kFloat16>{}, Constant<true>{});
    } else {
        p.bias == nullptr ? staged(Constant<kBfloat16>{}, Constant<false>{})
                          : staged(Constant<kBfloat16>{}, Constant<true>{});
    }
}

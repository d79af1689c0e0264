// Results and biases of products, whose type is known at launch: rotquant/kernels/products/output.py numbers them.
#pragma once

#include "values/element.cuh"

enum Dtype : int { kFloat16, kBfloat16, kFloat32 };

__device__ __forceinline__ float load_as_float(const void* values, int index, int dtype) {
    if (dtype == kFloat16) return __half2float(static_cast<const __half*>(values)[index]);
    if (dtype == kBfloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(values)[index]);
    return static_cast<const float*>(values)[index];
}

__device__ __forceinline__ void store_float(void* values, size_t index, float value, int dtype) {
    if (dtype == kFloat16)
        static_cast<__half*>(values)[index] = __float2half_rn(value);
    else if (dtype == kBfloat16)
        static_cast<__nv_bfloat16*>(values)[index] = __float2bfloat16_rn(value);
    else
        static_cast<float*>(values)[index] = value;
}

// Two neighbouring results as 16-bit floats in a word.
__device__ __forceinline__ u32 pack_pair(float first, float second, int dtype) {
    return dtype == kFloat16 ? Float16<__half>::pack(first, second) : Float16<__nv_bfloat16>::pack(first, second);
}

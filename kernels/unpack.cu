// Packed 4-bit activations (the order of rotquant.kernels.layouts.weights.pack_rows) to one int8 per value, for tensor cores
// without 4-bit integers. Any architecture.
#include "values/words.cuh"

extern "C" __global__ void unpack_codes(const uint4* packed, uint4* codes, long long blocks) {
    const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
    if (i >= blocks) return;
    const uint4 words = packed[i];
    // Byte b holds value b in its low and value b + 16 in its high half: sign-extended by xor and per-byte subtraction.
    auto low = [](u32 w) { return __vsub4((w & 0x0F0F0F0Fu) ^ 0x08080808u, 0x08080808u); };
    auto high = [&](u32 w) { return low(w >> 4); };
    codes[2 * i] = make_uint4(low(words.x), low(words.y), low(words.z), low(words.w));
    codes[2 * i + 1] = make_uint4(high(words.x), high(words.y), high(words.z), high(words.w));
}

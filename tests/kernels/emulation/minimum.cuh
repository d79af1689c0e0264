// As kernels/include/minimum.cuh, without its instructions.
#pragma once

inline float minimum(float a, float b) { return a != a || b != b ? __uint_as_float(0x7FC00000u) : a < b ? a : b; }
inline float maximum(float a, float b) { return a != a || b != b ? __uint_as_float(0x7FC00000u) : a > b ? a : b; }

// As kernels/include/values/extremes.cuh, without its instructions.
#pragma once

#include "values/element.cuh"

inline float minimum(float a, float b) { return a != a || b != b ? __uint_as_float(0x7FC00000u) : a < b ? a : b; }
inline float maximum(float a, float b) { return a != a || b != b ? __uint_as_float(0x7FC00000u) : a > b ? a : b; }

template <class T>
inline unsigned minimum_pair(unsigned a, unsigned b) {
    const float2 x = Float16<T>::unpack(a), y = Float16<T>::unpack(b);
    return Float16<T>::pack(minimum(x.x, y.x), minimum(x.y, y.y));
}

template <class T>
inline unsigned maximum_pair(unsigned a, unsigned b) {
    const float2 x = Float16<T>::unpack(a), y = Float16<T>::unpack(b);
    return Float16<T>::pack(maximum(x.x, y.x), maximum(x.y, y.y));
}

template <class T>
inline void count_equal(unsigned a, unsigned b, unsigned& counts) {
    const float2 x = Float16<T>::unpack(a), y = Float16<T>::unpack(b), sum = Float16<T>::unpack(counts);
    counts = Float16<T>::pack(sum.x + (x.x == y.x), sum.y + (x.y == y.y));
}

// Hadamard transform of any order H_n = H_K (x) H_2^k in shared memory, for what the tensor-core kernels do not take:
// float32 rows, float16 arithmetic (QuaRot Table 10), small powers of two beside a K, any head size. Optionally
// quantizes.
//
// One block transforms one row [n, inner] along its first axis: the K x K factor by additions with signs, then the
// powers of two, two bits at a time. With float16 arithmetic every factor of two is halved on the way, which keeps sums
// in range.
// Architectures: sm_80 and newer.
#include "values/element.cuh"
#include "epilogue/floats.cuh"
#include "pipeline/row_kind.cuh"
#include "values/reduce.cuh"

// What one launch computes.
struct Problem {
    const void* x;          // [rows, n * inner], or twice as wide = (gate | up) with kGated
    void* y;                // [rows, n * inner] in the type of x; unused with quantization
    const u32* signs;       // [core, ceil(core / 32)]: bit a of row b is set where output b takes input a negative
    Codes codes;
    int core, n, inner, columns;  // columns: n * inner padded to a multiple of 64, of the codes
    float norm;             // what is left to multiply by
    RowNorm row_norm;
};

constexpr int kMaxOutputs = 8;  // of the dense factor, for each thread between two barriers

template <class A>
__device__ __forceinline__ A negated_if(A x, bool negative) {
    return negative ? -x : x;
}

// The dense factor, for as many columns at a time as the threads have room for.
template <class A>
__device__ void apply_core(A* row, const Problem& p) {
    const int width = p.n / p.core * p.inner, words = (p.core + 31) / 32;
    const int at_once = min(width, max(1, kMaxOutputs * (int)blockDim.x / p.core));
    for (int first = 0; first < width; first += at_once) {
        const int count = p.core * min(at_once, width - first);
        A sums[kMaxOutputs];
#pragma unroll
        for (int r = 0; r < kMaxOutputs; ++r) {
            const int o = threadIdx.x + r * blockDim.x;
            if (o >= count) break;
            const int b = o / (count / p.core), c = first + o % (count / p.core);
            A sum = A(0.0f);
            for (int a = 0; a < p.core; ++a)
                sum += negated_if(row[a * width + c], __ldg(p.signs + b * words + a / 32) >> (a % 32) & 1);
            sums[r] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kMaxOutputs; ++r) {
            const int o = threadIdx.x + r * blockDim.x;
            if (o >= count) break;
            row[o / (count / p.core) * width + first + o % (count / p.core)] = sums[r];
        }
        __syncthreads();
    }
}

// Two bits of the power of two at once: elements `stride` and 2 * `stride` apart.
template <class A>
__device__ void apply_four(A* row, int elements, int stride, A factor) {
    for (int i = threadIdx.x; i < elements / 4; i += blockDim.x) {
        A* x = row + i / stride * 4 * stride + i % stride;
        const A a = x[0] + x[stride], b = x[0] - x[stride];
        const A c = x[2 * stride] + x[3 * stride], d = x[2 * stride] - x[3 * stride];
        x[0] = (a + c) * factor, x[stride] = (b + d) * factor;
        x[2 * stride] = (a - c) * factor, x[3 * stride] = (b - d) * factor;
    }
    __syncthreads();
}

template <class A>
__device__ void apply_two(A* row, int elements, int stride) {
    for (int i = threadIdx.x; i < elements / 2; i += blockDim.x) {
        A* x = row + i / stride * 2 * stride + i % stride;
        const A a = x[0], b = x[stride];
        x[0] = a + b, x[stride] = a - b;
    }
    __syncthreads();
}

template <class T, class A, Kind What>
__device__ void load_row(A* row, const Problem& p, int elements, float* scratch) {
    const T* x = static_cast<const T*>(p.x) + (long long)blockIdx.x * elements * (What == kGated ? 2 : 1);
    float factor = 1.0f;
    if constexpr (What == kNorm) {
        float squares = 0.0f;
        for (int i = threadIdx.x; i < elements; i += blockDim.x) {
            const float value = static_cast<float>(x[i]);
            squares = fmaf(value, value, squares);
        }
        factor = norm_factor(p.row_norm, block_sum(squares, scratch), elements);
    }
    const T* weight = static_cast<const T*>(p.row_norm.weight);
    for (int i = threadIdx.x; i < elements; i += blockDim.x) {
        float value = static_cast<float>(x[i]);
        if constexpr (What == kNorm) {
            value = rounded<T>(value * factor);
            if (weight) value = rounded<T>(value * static_cast<float>(weight[i]));
        }
        row[i] = A(What == kGated ? gated<T>(value, static_cast<float>(x[elements + i])) : value);
    }
    __syncthreads();
}

// Zeros beyond the row's end.
template <class A>
__device__ void load_values(float (&v)[8], const A* row, int at, int elements, float norm) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = at + i < elements ? float(row[at + i]) * norm : 0.0f;
}

template <class A, Output Out>
__device__ void quantize_groups(const A* row, const Problem& p, int elements) {
    const GroupRange<Out> range(p.codes, 1.0f);
    for (int first = 0; first < p.columns; first += 8 * blockDim.x) {  // whole warps: groups cross lanes
        const int at = first + 8 * threadIdx.x;
        const long long place = (long long)blockIdx.x * p.columns + at;
        float v[8];
        load_values(v, row, at, elements, p.norm);
        write_group<1>(range, v, static_cast<char*>(p.codes.codes) + place / 2,
                       reinterpret_cast<char*>(p.codes.scale) + place / range.kSize, at % range.kSize == 0,
                       at < p.columns);
    }
}

template <class A, Output Out>
__device__ void quantize_row(const A* row, const Problem& p, int elements, float* scratch) {
    float scale;
    if (p.codes.static_scale) {
        scale = *p.codes.static_scale;
    } else {
        float maximum = 0.0f;
        for (int i = threadIdx.x; i < elements; i += blockDim.x)
            maximum = fmaxf(maximum, fabsf(float(row[i]) * p.norm));
        scale = dynamic_scale(block_maximum(maximum, scratch), p.codes);
    }
    if (threadIdx.x == 0 && (blockIdx.x == 0 || !p.codes.static_scale)) p.codes.scale[blockIdx.x] = scale;
    const float reciprocal = __frcp_rn(scale);
    const E4m3Codes floats{reciprocal};
    for (int first = 0; first < p.columns; first += 8 * blockDim.x) {  // whole warps: packed codes cross lanes
        const int at = first + 8 * threadIdx.x;
        float v[8];
        if constexpr (Out == kFp8) {
            load_values(v, row, at, elements, p.norm);
            if (at < p.columns)
                __stcs(reinterpret_cast<uint2*>(static_cast<char*>(p.codes.codes) + (long long)blockIdx.x * p.columns +
                                                at), floats.held(v));
            continue;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
            v[i] = at + i < elements ? quotient(float(row[at + i]) * p.norm, scale, reciprocal) : 0.0f;
        const uint2 codes = codes_of(v, p.codes.largest);
        write_codes<Out>(p.codes, (long long)blockIdx.x * p.columns + at, codes, 2, at < p.columns);
    }
}

// One block to a row. A: the type of the arithmetic, float or __half. Dynamic shared memory: a row of A.
template <class T, class A, Output Out, Kind What>
__global__ void __launch_bounds__(1024) hadamard_any(const Problem p) {
    ptx::follow_previous_launch();
    extern __shared__ float4 shared[];
    __shared__ float scratch[32];
    A* row = reinterpret_cast<A*>(shared);
    const int elements = p.n * p.inner;
    load_row<T, A, What>(row, p, elements, scratch);

    int stride = p.inner;
    const A quarter = A(sizeof(A) == 2 ? 0.5f : 1.0f);
    const int end = p.n / p.core * p.inner;
    for (; 4 * stride <= end; stride *= 4) apply_four<A>(row, elements, stride, quarter);
    if (stride < end) apply_two<A>(row, elements, stride);
    if (p.core > 1) apply_core<A>(row, p);

    if constexpr (Out == kSame) {
        T* y = static_cast<T*>(p.y) + (long long)blockIdx.x * elements;
        for (int i = threadIdx.x; i < elements; i += blockDim.x) y[i] = T(float(row[i]) * p.norm);
    } else if constexpr (kInGroups<Out>) {
        quantize_groups<A, Out>(row, p, elements);
    } else {
        quantize_row<A, Out>(row, p, elements, scratch);
    }
}

// Uniform fake quantization of rows that share a scale, with the straight-through gradients of what training changes:
// the values, their scale and their zero point. Bound by memory: forward reads and writes each value once, backward reads
// value and gradient and writes a gradient. Arithmetic is float32, and a division where torch divides. sm_80 and newer.

#include "values/element.cuh"
#include "values/reduce.cuh"

namespace {

// Threads that share a row: of a whole block where rows are long, else lanes of a warp.
template <int Team>
struct Row {
    static constexpr int kThreads = 256;
    int thread, n;
    long long row;

    __device__ Row(int columns) : thread(threadIdx.x % Team), n(columns) {
        row = static_cast<long long>(blockIdx.x) * (kThreads / Team) + threadIdx.x / Team;
    }
    // The sum over the row, in its first thread at least.
    static __device__ __forceinline__ float sum(float x, float* scratch) {
        if constexpr (Team > 32) {
            return block_sum(x, scratch);
        } else {
            return warp_reduce<Sum, Team>(x);
        }
    }
};

}  // namespace

// out [rows, n] = (clamp(round(x / scale) + zero_point) - zero_point) * scale, rounded once to Out. scale, zero_point
// [rows]; zero_point may be null. n a multiple of eight.
template <class In, class Out, int Team>
__global__ void __launch_bounds__(256)
    round_rows(const In* x, const float* scale, const float* zero_point, float smallest, float largest,
               long long rows, int n, Out* out) {
    const Row<Team> at(n);
    if (at.row >= rows) return;
    const float s = scale[at.row], z = zero_point ? zero_point[at.row] : 0.f;
    x += at.row * n, out += at.row * n;
    for (int column = 8 * at.thread; column < n; column += 8 * Team) {
        float v[8];
        load_8(x + column, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float code = rintf(__fdiv_rn(v[i], s)) + z;
            // not fminf and fmaxf: as in torch, what is no number stays none
            v[i] = ((code < smallest ? smallest : code > largest ? largest : code) - z) * s;
        }
        store_8(out + column, v);
    }
}

// From the gradient of `out`: to_x, that of x (nothing outside of the codes' range); to_scale and to_zero_point [rows],
// those of the row's scale and zero point, summed over its n values in float32. to_zero_point may be null.
template <class In, class Out, int Team>
__global__ void __launch_bounds__(256)
    round_rows_backward(const Out* gradient, const In* x, const float* scale, const float* zero_point, float smallest,
                        float largest, long long rows, int n, In* to_x, float* to_scale, float* to_zero_point) {
    __shared__ float scratch[2][8];
    const Row<Team> at(n);
    const bool there = at.row < rows;  // shuffles need whole warps
    float of_scale = 0.f, of_zero_point = 0.f;
    if (there) {
        const float s = scale[at.row], z = zero_point ? zero_point[at.row] : 0.f;
        x += at.row * n, gradient += at.row * n, to_x += at.row * n;
        for (int column = 8 * at.thread; column < n; column += 8 * Team) {
            float v[8], g[8];
            load_8(x + column, v);
            load_8(gradient + column, g);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float ratio = __fdiv_rn(v[i], s), code = rintf(ratio) + z;
                const float inside = code < smallest ? smallest : code > largest ? largest : code;
                const bool clipped = inside != code;
                of_scale = fmaf(g[i], clipped ? inside - z : inside - z - ratio, of_scale);
                of_zero_point -= clipped ? g[i] : 0.f;
                v[i] = clipped ? 0.f : g[i];
            }
            store_8(to_x + column, v);
        }
        of_zero_point *= s;
    }
    of_scale = Row<Team>::sum(of_scale, scratch[0]);
    of_zero_point = Row<Team>::sum(of_zero_point, scratch[1]);
    if (there && at.thread == 0) {
        to_scale[at.row] = of_scale;
        if (to_zero_point) to_zero_point[at.row] = of_zero_point;
    }
}

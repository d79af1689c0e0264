// Fake quantization of weights in groups of input features, and its gradients (RCP, Choi et al. 2025, Secs. 4.2 and
// 4.3). Bound by memory: a weight is read once, and so is the gradient in the backward kernel, which finds extremes and
// codes anew. A few neighbouring lanes hold a group in registers and say to each other what it has in common.

#include "values/element.cuh"
#include "values/extremes.cuh"
#include "partition/quantizers.cuh"

namespace {

constexpr int kThreads = 256, kWarp = 32;
// Blocks of a multiprocessor at least, so that a thread has 80 registers, or 128 for what spills of ramps else.
constexpr int kBlocks = 3, kBlocksOfRamps = 2;
constexpr u32 kAllLanes = 0xFFFFFFFFu;
// Vectors of 16 bytes that a lane holds of a group; four give memory enough to do, and few lanes share the arithmetic
// that a group needs once.
constexpr int kVectors = 4;
// Lanes of a group: at least one for each parameter.
constexpr int kFewestLanes = 4;

constexpr int lanes_for(int vectors) {
    int lanes = kFewestLanes;
    while (lanes < kWarp && kVectors * lanes < vectors) lanes *= 2;
    return lanes;
}

// How the lanes of a warp lie over groups of `Size` elements.
template <class T, int Size>
struct Layout {
    static constexpr int kWidth = 16 / sizeof(T);  // elements of a vector
    static_assert(Size % kWidth == 0, "a group begins and ends with a vector");
    static constexpr int kAllVectors = Size / kWidth;
    static constexpr int kLanes = lanes_for(kAllVectors);
    static constexpr int kHeld = (kAllVectors + kLanes - 1) / kLanes;
    static_assert(kHeld <= kVectors, "a warp holds a group");
    static constexpr bool kFull = kAllVectors % kLanes == 0;
    static constexpr int kGroups = kWarp / kLanes;  // side by side in a warp
    // Groups that a lane's forward pass takes one after the other, all of them requested first.
    static constexpr int kTurns = kVectors / kHeld;

    // Its lane in the group.
    __device__ __forceinline__ static int lane() { return threadIdx.x % kLanes; }
    __device__ __forceinline__ static bool holds(int vector) { return kFull || lane() + vector * kLanes < kAllVectors; }
    __device__ __forceinline__ static int place(int vector) { return (lane() + vector * kLanes) * kWidth; }

    // Which group this lane serves in its first of `turns` turns; the next one is kGroups further on.
    __device__ __forceinline__ static long long first_group(int turns) {
        const long long warp = (static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
        return warp * turns * kGroups + threadIdx.x % kWarp / kLanes;
    }
};

// Infinity in both halves of a register.
template <class T>
constexpr u32 kInfinite = 0x7F807F80u;
template <>
constexpr u32 kInfinite<__half> = 0x7C007C00u;

// 16 bytes of a type, as floats and by words.
template <class T>
struct Vector {
    // Pairs of the least and of the most so far.
    struct Extremes {
        u32 least = kInfinite<T>, most = kInfinite<T> | 0x80008000u;

        __device__ __forceinline__ void take(u32 word) {
            least = minimum_pair<T>(least, word), most = maximum_pair<T>(most, word);
        }
        __device__ __forceinline__ float2 both() const {
            const float2 low = Float16<T>::unpack(least), high = Float16<T>::unpack(most);
            return {minimum(low.x, low.y), maximum(high.x, high.y)};
        }
    };

    // How many of a lane's values equal one.
    struct Count {
        u32 value, counts = 0;

        __device__ __forceinline__ explicit Count(float x) : value(Float16<T>::pack(x, x)) {}
        __device__ __forceinline__ void take(u32 word) { count_equal<T>(word, value, counts); }
        __device__ __forceinline__ float all() const {
            const float2 both = Float16<T>::unpack(counts);
            return both.x + both.y;
        }
    };

    __device__ __forceinline__ static void unpack(const uint4& raw, float (&x)[8]) { unpack_8<T>(raw, x); }
    __device__ __forceinline__ static void store(T* to, const float (&x)[8]) { store_8(to, x); }
};

template <>
struct Vector<float> {
    struct Extremes {
        float least = __uint_as_float(0x7F800000u), most = __uint_as_float(0xFF800000u);

        __device__ __forceinline__ void take(u32 word) {
            const float x = __uint_as_float(word);
            least = minimum(least, x), most = maximum(most, x);
        }
        __device__ __forceinline__ float2 both() const { return {least, most}; }
    };

    struct Count {
        float value, count = 0.f;

        __device__ __forceinline__ explicit Count(float x) : value(x) {}
        __device__ __forceinline__ void take(u32 word) {
            if (__uint_as_float(word) == value) count += 1.f;
        }
        __device__ __forceinline__ float all() const { return count; }
    };

    __device__ __forceinline__ static void unpack(const uint4& raw, float (&x)[4]) {
        x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y);
        x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
    }
    __device__ __forceinline__ static void store(float* to, const float (&x)[4]) {
        __stcs(reinterpret_cast<float4*>(to), float4{x[0], x[1], x[2], x[3]});
    }
};

// What is gathered word by word.
template <class T, class Gathered>
__device__ __forceinline__ void take(const uint4& raw, Gathered& into) {
    into.take(raw.x), into.take(raw.y), into.take(raw.z), into.take(raw.w);
}

template <class L, class T>
__device__ __forceinline__ void load(const T* group, uint4 (&raw)[L::kHeld]) {
#pragma unroll
    for (int i = 0; i < L::kHeld; ++i)
        if (L::holds(i)) raw[i] = __ldg(reinterpret_cast<const uint4*>(group + L::place(i)));
}

// The compiler takes these to be changed: floats that it made of them are made again instead of held, two for each.
template <int N>
__device__ __forceinline__ void forget_floats(uint4 (&raw)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm("" : "+r"(raw[i].x), "+r"(raw[i].y), "+r"(raw[i].z), "+r"(raw[i].w));
}

template <int Lanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int mask = Lanes / 2; mask; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
    return x;
}

}  // namespace

// What launches pass to both kernels.
struct Weights {
    const void* weight;        // [groups, size]
    const float* parameters0;  // gamma, beta, s1, s2, [groups] each
    const float* parameters1;
    const float* parameters2;
    const float* parameters3;
    long long groups;
    Grid grid;
};

namespace {

// This lane's parameter as a share: lanes 0 to 3 of a group have one each.
template <Kind K>
__device__ __forceinline__ float own_share(const Weights& w, long long group, int lane) {
    if (lane >= kParameters<K>) return 0.f;
    const float* from = lane == 0 ? w.parameters0 : lane == 1 ? w.parameters1 : lane == 2 ? w.parameters2 : w.parameters3;
    return __fdiv_rn(1.f, 1.f + expf(-__ldg(from + group)));
}

// The group whose vectors its lanes hold.
template <Kind K, class T, class L>
__device__ __forceinline__ Group group_of(const uint4 (&raw)[L::kHeld], float share) {
    typename Vector<T>::Extremes extremes;
#pragma unroll
    for (int i = 0; i < L::kHeld; ++i) {
        if (!L::holds(i)) continue;
        take<T>(raw[i], extremes);
    }
    const float2 both = extremes.both();
    Group group;
    group.least = both.x, group.most = both.y;
#pragma unroll
    for (int mask = L::kLanes / 2; mask; mask /= 2) {
        group.least = minimum(group.least, __shfl_xor_sync(kAllLanes, group.least, mask));
        group.most = maximum(group.most, __shfl_xor_sync(kAllLanes, group.most, mask));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        group.shares[i] = i < kParameters<K> ? __shfl_sync(kAllLanes, share, i, L::kLanes) : 0.f;
    return group;
}

}  // namespace

// out [groups, size]: each weight as its code stands for it.
template <class T, Kind K, int Size>
__global__ void __launch_bounds__(kThreads, kBlocks) partition_forward(Weights w, T* out) {
    using L = Layout<T, Size>;
    const long long first = L::first_group(L::kTurns);
    uint4 raw[L::kTurns][L::kHeld];
    float shares[L::kTurns];
#pragma unroll
    for (int turn = 0; turn < L::kTurns; ++turn) {
        // Lanes beyond the end repeat the last group: all take part in what a warp does together.
        const long long group = min(first + turn * L::kGroups, w.groups - 1);
        load<L>(static_cast<const T*>(w.weight) + group * Size, raw[turn]);
        shares[turn] = own_share<K>(w, group, L::lane());
    }
#pragma unroll
    for (int turn = 0; turn < L::kTurns; ++turn) {
        const Quantizer<K, kStep> quantizer(group_of<K, T, L>(raw[turn], shares[turn]), w.grid);
        forget_floats(raw[turn]);
        const long long group = first + turn * L::kGroups;
#pragma unroll
        for (int i = 0; i < L::kHeld; ++i) {
            if (group >= w.groups || !L::holds(i)) continue;
            float x[L::kWidth];
            Vector<T>::unpack(raw[turn][i], x);
#pragma unroll
            for (int j = 0; j < L::kWidth; ++j) x[j] = quantizer.value(x[j]);
            Vector<T>::store(out + group * Size + L::place(i), x);
        }
    }
}

// From the gradient of `out` to those of the weight, of its type, and of the parameters, [groups] each.
template <class T, Kind K, StraightThrough S, int Size>
__global__ void __launch_bounds__(kThreads, S == kRamp ? kBlocksOfRamps : kBlocks)
    partition_backward(Weights w, const T* gradient, T* to_weight, float* to_parameters0, float* to_parameters1,
                       float* to_parameters2, float* to_parameters3) {
    using L = Layout<T, Size>;
    using Q = Quantizer<K, S>;
    const long long own = L::first_group(1), index = min(own, w.groups - 1);
    uint4 raw[L::kHeld], raw_gradient[L::kHeld];
    load<L>(static_cast<const T*>(w.weight) + index * Size, raw);
    load<L>(gradient + index * Size, raw_gradient);
    const Group group = group_of<K, T, L>(raw, own_share<K>(w, index, L::lane()));
    const Q quantizer(group, w.grid);
    forget_floats(raw);

    // How many weights equal the least, and how many the most: in one number.
    constexpr float kMost = 4096.f;
    static_assert(Size < 4096, "counts of a group stay apart, and exact");
    float sums[Q::kSums] = {};
    typename Vector<T>::Count least(group.least), most(group.most);
#pragma unroll
    for (int i = 0; i < L::kHeld; ++i) {
        if (!L::holds(i)) continue;
        float x[L::kWidth], g[L::kWidth];
        Vector<T>::unpack(raw[i], x);
        Vector<T>::unpack(raw_gradient[i], g);
#pragma unroll
        for (int j = 0; j < L::kWidth; ++j) quantizer.gather(x[j], g[j], sums);
        take<T>(raw[i], least), take<T>(raw[i], most);
    }
#pragma unroll
    for (int i = 0; i < Q::kSums; ++i) sums[i] = sum_of_lanes<L::kLanes>(sums[i]);
    const float counts = sum_of_lanes<L::kLanes>(least.all() + kMost * most.all());

    const GroupGradient to = quantizer.backward(group, sums);
    const float count_most = truncf(counts * (1.f / kMost)), count_least = counts - count_most * kMost;
    // Equal ones share. Where something is not a number nothing equals the least, and no gradient is a number.
    const float to_least = __fdividef(to.least, count_least), to_most = __fdividef(to.most, count_most);
    if (own >= w.groups) return;
    forget_floats(raw), forget_floats(raw_gradient);
#pragma unroll
    for (int i = 0; i < L::kHeld; ++i) {
        if (!L::holds(i)) continue;
        float x[L::kWidth], g[L::kWidth];
        Vector<T>::unpack(raw[i], x);
        Vector<T>::unpack(raw_gradient[i], g);
#pragma unroll
        for (int j = 0; j < L::kWidth; ++j) {
            g[j] = quantizer.direct(x[j], g[j]);
            g[j] = fmaf(x[j] == group.least ? 1.f : 0.f, to_least, g[j]);
            g[j] = fmaf(x[j] == group.most ? 1.f : 0.f, to_most, g[j]);
        }
        Vector<T>::store(to_weight + own * Size + L::place(i), g);
    }
    const int lane = L::lane();
    if (lane < kParameters<K>) {
        float* to_parameters[4] = {to_parameters0, to_parameters1, to_parameters2, to_parameters3};
#pragma unroll
        for (int i = 0; i < kParameters<K>; ++i)
            if (lane == i) to_parameters[i][own] = to.parameters[i];
    }
}

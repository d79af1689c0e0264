// What kernels that quantize rows without a transform compute (activations_16.cu, activations.cu), a block to a row.
#pragma once

#include "epilogue/codes.cuh"
#include "pipeline/row_kind.cuh"

struct Problem {
    const void* x;         // [rows, n], or [rows, 2n] = (gate | up) with kGated
    const void* residual;  // [rows, n]; with kSumNorm
    const void* weight;    // [n] or null; with the norms
    void* hidden;          // [rows, n] = x + residual; with kSumNorm
    Codes codes;
    int n, columns;        // n a multiple of 8; columns: n padded to a multiple of 64 with zero codes
    float eps;
};

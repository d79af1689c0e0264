// Which rows a block takes. As many blocks as the GPU holds at once take most of the rows, evenly; the rest is dealt
// out in short runs to whichever multiprocessor is free, because those that share their way to memory with fewer others
// are faster.
#pragma once

struct Share {
    int blocks;  // that take an even part
    int even;    // rows of that part, a multiple of `blocks`
    int run;     // rows of each later block
};

struct Rows {
    int first, step, end;
};

// This block's of `rows` rows.
__device__ __forceinline__ Rows rows_of_block(const Share& share, int rows) {
    const int block = blockIdx.x, later = block - share.blocks;
    if (later < 0) return {block, share.blocks, share.even};
    const int first = share.even + later * share.run;
    return {first, 1, min(first + share.run, rows)};
}

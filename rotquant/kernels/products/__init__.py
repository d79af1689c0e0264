"""Matrix products: many rows (GEMM), few rows (GEMV), look-up tables, and the layer that chooses."""

"""CUDA kernels as torch operators, with torch references: the real integer arithmetic that the library simulates.

Every family module offers `sources(architecture)`: all it may ever ask the compiler for at the papers' shapes.
"""

#: Modules that own CUDA sources of the decoders in 16 bits and less; `fp8` beside them owns that of the float8 one.
FAMILIES = ("hadamard", "activations", "gemm", "gemv", "lut", "attention", "elementwise")

"""CUDA kernels as torch operators, with torch references: the real integer arithmetic that the library simulates.

Every module that owns CUDA sources offers `sources(architecture)`: all it may ever ask the compiler for at the papers'
shapes.
"""

"""Launching CUDA sources: compiling, arguments, tensor maps, operators of torch."""

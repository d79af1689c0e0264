"""The computing stages of the workflow: learned rotations, quantized weights, and measurements on them.

They connect the library with the result files; importing them is what costs time, so commands do it last.
"""

"""The two computing stages of the workflow: quantized weights, and one measurement on them.

They connect the library with the result files; importing them is what costs time, so commands do it last.
"""

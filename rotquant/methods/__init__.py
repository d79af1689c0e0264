"""The published methods that QuaRot is compared with, each one a short module on the shared primitives.

smoothquant and omniquant rescale features equivalently before quantization, outliers chooses the features that QUIK and
Atom keep in higher precision, statistics measures what all of them start from. None has a quantizer of its own.
"""

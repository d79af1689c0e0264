"""The published methods that QuaRot is compared with, each one a short module on the shared primitives.

smoothquant, omniquant and awq rescale features equivalently before quantization, llm_qat trains the weights, outliers
chooses the features that QUIK and Atom keep in higher precision, spinquant learns rotations, statistics measures what
several of them start from. None has a quantizer of its own, but for quip, which rounds to a lattice.
"""

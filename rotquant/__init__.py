"""rotquant: rotation-based LLM quantization (QuaRot, SpinQuant, RCP, PrefixQuant), reproduced and tested."""

__version__ = "0.2.0"

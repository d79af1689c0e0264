"""Benchmarks of files on disk (RCP Table 6)."""

from typing import Literal

from pydantic import model_validator

from rotquant.foundation.data import Frozen

#: Bits that a quantizer of weights has, by its name in `qat.quantizers`.
_BITS = {"range": (2, 3), "ldp": (2,), "nf3": (3,), "nf3_ldp": (3,)}


class CheckpointArguments(Frozen):
    """Files of a model with random weights at a shape: linear layers quantized in groups of 128, the rest in 16 bits.

    quantizer: of linear layers' weights; None leaves them in 16 bits. bits: of a code.
    form: as the weights stage stores them, or as the decoder reads them.
    tied: embedding and head are one tensor.
    """

    shape: str
    quantizer: Literal["range", "ldp", "nf3", "nf3_ldp"] | None = None
    bits: Literal[2, 3, 16] = 16
    form: Literal["stored", "decoder"] = "stored"
    tied: bool = False

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "CheckpointArguments":
        if self.bits not in (_BITS[self.quantizer] if self.quantizer else (16,)):
            raise ValueError(f"weights of {self.quantizer or 'no quantizer'} do not have {self.bits} bits")
        if self.form == "decoder" and self.bits != 2:
            raise ValueError("the decoder reads tables of 2-bit codes; other widths are simulated")
        return self

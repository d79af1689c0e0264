"""Tables in float16: what the paper counts for a group is kept, and all levels follow from it bit for bit."""

from pathlib import Path

import pytest
import torch

from rotquant.foundation.errors import CheckpointError
from rotquant.qat.quantizers import Kind, make_quantizer
from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.codebook import CodebookWeight
from rotquant.tensors.codebook_compression import anchors_of, compressions, in_float16
from rotquant.weights.packing import take_weight, weight_tensors

#: Float16 numbers that RCP's Table 6 counts for a group.
KEPT = {("range", 2): 2, ("nf3", 3): 2, ("nf3_ldp", 3): 3, ("ldp", 2): None, ("learned_range", 3): 2}


def trained(kind: Kind, bits: int) -> CodebookWeight:
    """A weight of a quantizer whose parameters are no longer where they began."""
    generator = torch.Generator().manual_seed(bits)
    weight = 0.03 * torch.randn(24, 384, generator=generator)
    quantizer = make_quantizer(kind, weight, 128, bits)
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return quantizer.freeze(weight)


@pytest.mark.parametrize(("kind", "bits"), KEPT)
def test_levels_are_rounded_to_float16(kind: Kind, bits: int) -> None:
    exact = trained(kind, bits)
    rounded = in_float16(exact)
    assert rounded.levels.dtype == torch.float16
    assert torch.equal(rounded.codes, exact.codes)
    # Ends are rounded to 2^-11 of themselves, and what is computed between them once more.
    largest = exact.levels.abs().amax(-1, keepdim=True)
    assert ((rounded.levels.float() - exact.levels).abs() <= 2**-10 * largest).all()
    assert torch.equal(in_float16(rounded).levels, rounded.levels)


@pytest.mark.parametrize(("kind", "bits"), KEPT)
def test_a_table_follows_from_as_many_numbers_as_the_paper_counts(kind: Kind, bits: int) -> None:
    weight = in_float16(trained(kind, bits))
    found, kept = anchors_of(weight), KEPT[kind, bits]
    if kept is None:
        assert found is None
        return
    name, anchors = found
    assert anchors.shape == (24, 3, kept)
    assert anchors.dtype == torch.float16
    assert torch.equal(compressions(bits)[name].levels(anchors), weight.levels)


def test_levels_that_were_not_rounded_are_all_kept() -> None:
    assert anchors_of(trained("range", 2)) is None
    odd = in_float16(trained("range", 2))
    odd.levels[3, 1, 2] = torch.nextafter(odd.levels[3, 1, 2].float(), torch.tensor(1.0)).half() + 2**-13
    assert anchors_of(odd) is None


@pytest.mark.parametrize("bits", [2, 3])
def test_anchors_are_levels_themselves(bits: int) -> None:
    for compression in compressions(bits).values():
        anchors = torch.randn(5, 2, len(compression.anchors)).half()
        levels = compression.levels(anchors)
        assert torch.equal(levels[..., list(compression.anchors)], anchors)


@pytest.mark.parametrize(("kind", "bits"), KEPT)
def test_a_stored_table_takes_what_the_paper_counts_and_comes_back(kind: Kind, bits: int) -> None:
    weight = in_float16(trained(kind, bits))
    tensors = weight_tensors("it", weight)
    numbers = KEPT[kind, bits] or 2**bits
    assert sum(tensor.nbytes for tensor in tensors.values()) == 24 * 3 * (128 * bits // 8 + 2 * numbers)
    scheme = QuantizationScheme(bits=bits, symmetric=False, granularity="group", group_size=128)
    found = take_weight(Path("folder"), "it", (24, 384), scheme, tensors)
    assert not tensors
    assert torch.equal(found.codes, weight.codes)
    assert torch.equal(found.levels, weight.levels)


def test_damaged_anchors_are_one_sentence() -> None:
    scheme = QuantizationScheme(bits=3, symmetric=False, granularity="group", group_size=128)
    intact = weight_tensors("it", in_float16(trained("nf3", 3)))
    for anchors, problem in (
        (intact["it.sides"][:, :2], r"it.sides has shape \[24, 2, 2\], expected \[24, 3, 2\]"),
        (intact["it.sides"].float(), "it.sides is of type float32"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            take_weight(Path("folder"), "it", (24, 384), scheme, intact | {"it.sides": anchors})
    two = scheme.model_copy(update={"bits": 2})
    with pytest.raises(CheckpointError, match=r"it.codes has shape"):
        take_weight(Path("folder"), "it", (24, 384), two, intact)

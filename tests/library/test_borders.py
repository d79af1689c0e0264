"""Texts for comparisons of quantized networks leave no code to the last bit of a sum."""

import pytest
import torch

from rotquant.recipes.schemes import QuantizationScheme
from rotquant.tensors.quantization import fake_quantize
from tests.helpers.borders import Borders, tokens_off_borders
from tests.helpers.models import tiny_tokens

SCHEME = QuantizationScheme(bits=4, symmetric=False)


@pytest.mark.parametrize(("element", "margin"), [(7.5, 0.0), (7.25, 0.25), (7.0, 0.5), (-0.0, 0.5)])
def test_the_margin_is_the_distance_to_the_nearest_border_in_steps(element: float, margin: float) -> None:
    for gradients in (False, True):
        with Borders() as borders:
            fake_quantize(0.1 * torch.tensor([0.0, element, 15.0], requires_grad=gradients), SCHEME)
        assert borders.margin == pytest.approx(margin, abs=1e-6)


def test_texts_with_an_input_on_a_border_are_passed_over() -> None:
    bordered = [tiny_tokens(seed=seed) for seed in range(2)]

    def compute(tokens: torch.Tensor) -> None:
        on_border = any(torch.equal(tokens, other) for other in bordered)
        fake_quantize(torch.tensor([0.0, 7.5 if on_border else 7.0, 15.0]), SCHEME)

    assert torch.equal(tokens_off_borders(compute), tiny_tokens(seed=2))
    with pytest.raises(AssertionError, match="within 1e-09 steps of a border"):
        tokens_off_borders(lambda _: fake_quantize(torch.tensor([0.0, 7.5, 15.0]), SCHEME))

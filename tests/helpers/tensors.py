"""Random tensors with outliers for property-based tests."""

import torch
from hypothesis import strategies as st


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[2, rows, 8] with rows of very different size, some zero, some of one sign: activations with outliers."""
    rows = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(2, rows, 8, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-6, 7, (2, rows, 1), generator=generator).to(torch.float64)
    kind = torch.randint(0, 5, (2, rows, 1), generator=generator)
    x = torch.where(kind == 0, 0.0, torch.where(kind == 1, x.abs() + 1, x)) * 10**exponents
    return x.to(dtype)

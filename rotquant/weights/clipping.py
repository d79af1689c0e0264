"""Weight clipping (QuaRot Sec. 5: "we extract the clipping ratio using a linear search over the squared error").

For each scale of a weight the ratio in {1.00, 0.99, ..., 0.21} with the least sum |w - rounded w|^norm is chosen.
Candidates are rounded by the project's one quantizer; this module never decides how rounding works.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rotquant.kernels.rows import clip_search
from rotquant.models.memory import CANDIDATES_AT_ONCE
from rotquant.recipes.schemes import QuantizationScheme, WeightQuantization
from rotquant.tensors.devices import of_device
from rotquant.tensors.fp4 import global_scale
from rotquant.tensors.quantization import QParams, check_groups, choose_qparams, fake_quantize, grouped

#: Relative difference of two errors that float32's last bits, of powers and of sums, might decide: far above them.
_CLOSE = 1e-5


@torch.no_grad()
def search_clip(weight: Tensor, scheme: QuantizationScheme, norm: float, steps: int = 80) -> Tensor:
    """The best clip ratio of every scale.

    Args:
        weight: [out, in], float32 or float64.
        scheme: granularity `tensor`, `channel` or `group`; its own clip_ratio is not used.
        norm: exponent of the error, 2 as in the paper, 2.4 as in the authors' code.
        steps: number of candidates, from 1.0 downwards in steps of 0.01; at most 100.

    Returns:
        Ratios in the shape of the scheme's scales, [], [out, 1] or [out, groups, 1], of `weight`'s type. Of equally
        good ratios the largest wins.

    Raises:
        ValueError: for `steps` outside 1..100.
        RecipeError: when the group size exceeds `in`.
    """
    if not 1 <= steps <= 100:
        raise ValueError(f"clip search takes 1 to 100 steps of 1 %, not {steps}")
    check_groups(weight.shape[1], scheme)
    ragged = weight.shape[1] % (scheme.group_size or weight.shape[1])
    if ragged:
        last = scheme.model_copy(update={"group_size": ragged})
        parts = ((weight[:, :-ragged], scheme), (weight[:, -ragged:], last))
        return torch.cat([search_clip(part, own, norm, steps) for part, own in parts], dim=1)
    view = grouped(weight, scheme)
    shape = () if scheme.granularity == "tensor" else (*view.shape[:-1], 1)
    rows = view.reshape(1, -1) if scheme.granularity == "tensor" else view.reshape(-1, view.shape[-1])
    per_row = scheme.model_copy(update={"granularity": "channel", "group_size": None})
    candidates = 1.0 - torch.arange(steps, dtype=weight.dtype, device=weight.device) / 100
    budget = of_device(CANDIDATES_AT_ONCE, weight.device)
    chunk = max(1, budget // rows.shape[-1])
    return torch.cat([_search_rows(part, per_row, norm, candidates, budget) for part in rows.split(chunk)]).view(shape)


def clips_of(settings: WeightQuantization) -> Callable[[Tensor], Tensor] | None:
    """The search for clips of a weight that is rounded while something is learned; None where settings ask for none.

    It is `search_clip`, and on a GPU one kernel where there is one: of ratios whose errors differ by no more than the
    rounding of float32's sums they may take different ones.
    """
    return partial(_search, scheme=settings.scheme, norm=settings.clip_norm) if settings.clip_search else None


@torch.no_grad()
def _search(weight: Tensor, scheme: QuantizationScheme, norm: float) -> Tensor:
    if not weight.is_cuda or clip_search.problem(weight, scheme):
        return search_clip(weight, scheme, norm)
    return clip_search.search(weight, scheme, norm)


def choose_weight_qparams(
    weight: Tensor, scheme: QuantizationScheme, clip_norm: float | None, largest: Tensor | None = None
) -> QParams:
    """Scales of a weight [out, in] under searched clip ratios, or the scheme's own ratio when `clip_norm` is None.

    largest: |value| that the scale of the whole tensor covers, where it has one; by default the weight's own.
    """
    if scheme.fp4 == "NVFP4":
        whole = weight.abs().amax() if largest is None else largest.to(weight.dtype)
        return choose_qparams(weight, scheme, global_scale=global_scale(whole))
    ratio = None if clip_norm is None else search_clip(weight, scheme, clip_norm)
    return choose_qparams(weight, scheme, ratio)


def largest_of(weights: Sequence[Tensor], scheme: QuantizationScheme) -> Tensor | None:
    """The largest |value| of linear layers that read one input, where they are to share the scale of a whole tensor.

    Engines multiply them as one matrix, which has one such scale (NVFP4).
    """
    return torch.stack([weight.abs().amax() for weight in weights]).amax() if scheme.fp4 == "NVFP4" else None


def _power(error: Tensor, norm: float) -> Tensor:
    """|error|^norm, in place. A CPU takes logarithms and exponentials in a quarter of the time of powers."""
    if norm == 2:
        return error.square_()
    return error.abs_().log_().mul_(norm).exp_() if error.device.type == "cpu" else error.abs_().pow_(norm)


def _search_rows(rows: Tensor, scheme: QuantizationScheme, norm: float, candidates: Tensor, budget: int) -> Tensor:
    """Best ratio of each row [n, elements]: [n]. Takes as many candidates at a time as fit into `budget` elements.

    Rows are turned into columns, so that neighbours in memory have scales that are neighbours too: a third of the time
    for groups of 8 on a CPU. Rows of float32 whose two best candidates are close are decided in float64.
    """
    extremes = torch.stack([rows.amin(-1), rows.amax(-1)], dim=-1)  # all that a scale depends on
    columns = rows.T.contiguous()
    parts = []
    for ratios in candidates.split(max(1, budget // rows.numel())):
        qparams = choose_qparams(extremes, scheme, ratios.view(-1, 1, 1)).mT
        error = fake_quantize(columns.expand(len(ratios), -1, -1), scheme, qparams).sub_(columns)
        parts.append(_power(error, norm).sum(dim=1))
    errors = torch.cat(parts)
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or len(candidates) == 1:
        return candidates[errors.argmin(dim=0)]
    (least, next_least), (best, _) = errors.topk(2, dim=0, largest=False, sorted=True)
    ratios = candidates[best]
    close = (next_least - least <= _CLOSE * least).nonzero().flatten()  # equal ones among them
    if close.numel():
        ratios[close] = _search_rows(rows[close].double(), scheme, norm, candidates.double(), budget).float()
    return ratios

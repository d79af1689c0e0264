"""The papers' methods as recipes: `preset("quarot")` is what the QuaRot paper evaluates, every setting stated.

Group sizes and outlier counts are the papers' (for widths of 4096 and up); a slot of the configuration scales them
to its model. Sources: QuaRot Sec. 5 (setup) and Table 1; each method's own paper where QuaRot is silent.
"""

from collections.abc import Callable

from rotquant.errors import RecipeError, nearest
from rotquant.recipes import Recipe
from rotquant.schemes import (
    GPTQ,
    Calibration,
    OmniQuant,
    OutlierFeatures,
    QuantizationScheme,
    RotationScheme,
    Smoothing,
    WeightQuantization,
)


def _inputs(
    bits: int = 4, clip_ratio: float = 1.0, group_size: int | None = None, symmetric: bool = True
) -> QuantizationScheme:
    return QuantizationScheme(
        bits=bits,
        symmetric=symmetric,
        granularity="token" if group_size is None else "group",
        group_size=group_size,
        clip_ratio=clip_ratio,
    )


def _weights(
    bits: int = 4,
    gptq: bool = True,
    group_size: int | None = None,
    clip_search: bool = True,
    symmetric: bool = True,
) -> WeightQuantization:
    granularity = "channel" if group_size is None else "group"
    scheme = QuantizationScheme(bits=bits, symmetric=symmetric, granularity=granularity, group_size=group_size)
    return WeightQuantization(scheme=scheme, gptq=GPTQ() if gptq else None, clip_search=clip_search)


def _cache(bits: int = 4, clip_ratio: float = 1.0) -> QuantizationScheme:
    return QuantizationScheme(bits=bits, symmetric=False, granularity="head", clip_ratio=clip_ratio)


def baseline() -> Recipe:
    """The unquantized model."""
    return Recipe()


def rtn() -> Recipe:
    """Round-to-nearest W4A4KV4 without any rotation: what outliers do to a model that nothing protects."""
    return Recipe(weights=_weights(gptq=False), activations=_inputs(), keys=_cache(), values=_cache())


def quarot() -> Recipe:
    """QuaRot W4A4KV4 with GPTQ: input clip 0.9, KV clip 0.95 asymmetric per head, weight clip search (Sec. 5)."""
    cache = _cache(clip_ratio=0.95)
    return Recipe(
        rotation=RotationScheme(),
        weights=_weights(),
        activations=_inputs(clip_ratio=0.9),
        keys=cache,
        values=cache,
        calibration=Calibration(),
    )


def quarot_rtn() -> Recipe:
    """QuaRot with round-to-nearest weights (Table 3): needs no calibration text."""
    return quarot().model_copy(update={"weights": _weights(gptq=False), "calibration": None})


def quarot_128g() -> Recipe:
    """QuaRot with groups of 128 for weights and inputs (Table 1, last row; Table 4)."""
    return quarot().model_copy(
        update={"weights": _weights(group_size=128), "activations": _inputs(clip_ratio=0.9, group_size=128)}
    )


def smoothquant() -> Recipe:
    """SmoothQuant (alpha 0.5) with round-to-nearest W4A4KV4, per-token inputs and per-channel weights."""
    return Recipe(
        smoothing=Smoothing(),
        weights=_weights(gptq=False, clip_search=False),
        activations=_inputs(),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def omniquant() -> Recipe:
    """OmniQuant W4A4KV4: learnable weight clipping and equivalent transformation, then round-to-nearest.

    Weights and inputs are asymmetric as in OmniQuant's own paper (Eq. 2), where QuaRot's numbers come from.
    """
    return Recipe(
        omniquant=OmniQuant(),
        weights=_weights(gptq=False, clip_search=False, symmetric=False),
        activations=_inputs(symmetric=False),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def quik() -> Recipe:
    """QUIK-4B: 256 outlier features in floating point, GPTQ, every layer in 4 bits, asymmetric inputs."""
    return Recipe(
        outliers=OutlierFeatures(features=256),
        weights=_weights(),
        activations=_inputs(symmetric=False),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def atom_128g() -> Recipe:
    """Atom: 128 reordered outlier features in INT8, groups of 128, GPTQ, input clip 0.9, asymmetric 4-bit KV cache."""
    return Recipe(
        outliers=OutlierFeatures(features=128, bits=8, statistic="square", order="ascending"),
        weights=_weights(group_size=128),
        activations=_inputs(clip_ratio=0.9, group_size=128),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


PRESETS: dict[str, Callable[[], Recipe]] = {
    "baseline": baseline,
    "rtn": rtn,
    "smoothquant": smoothquant,
    "omniquant": omniquant,
    "quik": quik,
    "quarot": quarot,
    "quarot-rtn": quarot_rtn,
    "quarot-128g": quarot_128g,
    "atom-128g": atom_128g,
}


def preset(name: str) -> Recipe:
    """The recipe of a published method.

    Raises:
        RecipeError: for an unknown name; the sentence lists the nearest ones.
    """
    if name not in PRESETS:
        raise RecipeError(f"unknown method {name!r}{nearest(name, list(PRESETS))}.")
    return PRESETS[name]()

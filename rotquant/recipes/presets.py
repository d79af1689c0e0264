"""The papers' methods as recipes: `preset("quarot")` is what the QuaRot paper evaluates, every setting stated.

Group sizes and outlier counts are the papers' (for widths of 4096 and up); a slot of the configuration scales them
to its model. Sources: QuaRot Sec. 5 (setup) and Table 1, SpinQuant Sec. 4.1 and A.4; each method's own paper where
these are silent.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rotquant.foundation.errors import RecipeError, nearest
from rotquant.recipes.recipe import Recipe, find_method, override
from rotquant.recipes.registry import method_names
from rotquant.recipes.schemes import Calibration, QuantizationScheme, RotationScheme, WeightQuantization


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
    group_size: int | None = None,
    clip_search: bool = True,
    symmetric: bool = True,
) -> WeightQuantization:
    granularity = "channel" if group_size is None else "group"
    scheme = QuantizationScheme(bits=bits, symmetric=symmetric, granularity=granularity, group_size=group_size)
    return WeightQuantization(scheme=scheme, clip_search=clip_search)


def _cache(bits: int = 4, clip_ratio: float = 1.0, symmetric: bool = False) -> QuantizationScheme:
    return QuantizationScheme(bits=bits, symmetric=symmetric, granularity="head", clip_ratio=clip_ratio)


def _recipe(methods: Mapping[str, Mapping[str, Any]], **sections: Any) -> Recipe:
    """A recipe of methods by their names, each with what it sets of its settings."""
    return Recipe.model_validate({"methods": methods, **sections})


#: GPTQ in activation order, with groups of neighbours that exports hold.
_ORDERED = {"act_order": True, "group_scales": "static"}


def baseline() -> Recipe:
    """The unquantized model."""
    return Recipe()


def rtn() -> Recipe:
    """Round-to-nearest W4A4KV4 without any rotation: what outliers do to a model that nothing protects."""
    return Recipe(weights=_weights(), activations=_inputs(), keys=_cache(), values=_cache())


def gptq() -> Recipe:
    """GPTQ W4A4KV4 without any rotation (SpinQuant Table 1): asymmetric inputs and cache, none of them clipped."""
    return _recipe(
        {"gptq": {}},
        weights=_weights(),
        activations=_inputs(symmetric=False),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def gptq_w4a16() -> Recipe:
    """GPTQ with 4-bit weights alone, symmetric in groups of 128, which every engine and the W4A16 kernel here run.

    Columns are rounded in activation order with scales of neighbours, and clips are searched. On pretrained models
    (`tests.trials.weights_alone`) this loses a fourth of what one scale per output channel in natural order does. A
    search by channel would clip the few weights that make massive activations (Yu et al. 2024, "The Super Weight").
    """
    return _recipe({"gptq": _ORDERED}, weights=_weights(group_size=128), calibration=Calibration())


def quarot_w4a16() -> Recipe:
    """QuaRot with 4-bit weights alone: gptq-w4a16 with R1 and R2, which stay in the weights, so that it runs wherever
    that does. The paper's Table 7 has the online transforms too, and asymmetric weights."""
    fused = RotationScheme(heads=False, keys=False, mlp=False)
    return _recipe({"gptq": _ORDERED}, rotation=fused, weights=_weights(group_size=128), calibration=Calibration())


def quarot_w4a16_tuned() -> Recipe:
    """quarot-w4a16 whose weights and scales are trained block by block (EfficientQAT's Block-AP) in place of GPTQ, as
    other libraries learn how weights are rounded. Settings are chosen on validation text
    (`tests.trials.weights_alone`), in KL divergence of SmolLM2-135M and Gemma 3 270M, one seed: 4 epochs .110 and .201,
    12 epochs .092 and .181, with the relative loss .089 and .174. Twice as large rates ruin Gemma. Where it begins with
    GPTQ's codes it is worse (.104 on SmolLM2). On Gemma, whose norms let no R1 pass, quarot-w4a16 stays ahead
    (.165; docs/peers.md)."""
    text = Calibration().model_dump()
    effort = {"text": text, "epochs": 12, "batch_size": 8, "loss": "relative"}
    tuned = {**effort, "scale_lr": 2e-5, "weight_lr": 5e-5, "schedule": "cosine"}
    weights = _weights(group_size=128, clip_search=False)
    return _recipe({"block_ap": tuned}, rotation=quarot_w4a16().rotation, weights=weights)


def quarot() -> Recipe:
    """QuaRot W4A4KV4 with GPTQ: input clip 0.9, KV clip 0.95 asymmetric per head, weight clip search (Sec. 5)."""
    cache = _cache(clip_ratio=0.95)
    return _recipe(
        {"gptq": {}},
        rotation=RotationScheme(),
        weights=_weights(),
        activations=_inputs(clip_ratio=0.9),
        keys=cache,
        values=cache,
        calibration=Calibration(),
    )


def quarot_rtn() -> Recipe:
    """QuaRot with round-to-nearest weights (Table 3): needs no calibration text."""
    return override(quarot(), {"methods": {"gptq": None}, "calibration": None}, "quarot-rtn")


def quarot_128g() -> Recipe:
    """QuaRot with groups of 128 for weights and inputs (Table 1, last row; Table 4)."""
    return quarot().model_copy(
        update={"weights": _weights(group_size=128), "activations": _inputs(clip_ratio=0.9, group_size=128)}
    )


def smoothquant() -> Recipe:
    """SmoothQuant (alpha 0.85, its authors' for Llama) with round-to-nearest W4A4KV4, per-token inputs and per-channel
    weights."""
    return _recipe(
        {"smoothquant": {"alpha": 0.85}},
        weights=_weights(clip_search=False),
        activations=_inputs(),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def omniquant() -> Recipe:
    """OmniQuant W4A4KV4: learnable weight clipping and equivalent transformation, then round-to-nearest.

    Weights and inputs are asymmetric as in OmniQuant's own paper (Eq. 2), where QuaRot's numbers come from.
    """
    return _recipe(
        {"omniquant": {}},
        weights=_weights(clip_search=False, symmetric=False),
        activations=_inputs(symmetric=False),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def duquant() -> Recipe:
    """DuQuant W4A4KV4 without learned clipping, its authors' first script (run.sh, which their README gives): alpha
    0.6, weights clipped to 0.8 and inputs to 0.9 of their ranges, all asymmetric, R3 on queries and keys."""
    scheme = QuantizationScheme(bits=4, symmetric=False, granularity="channel", clip_ratio=0.8)
    return _recipe(
        {"duquant": {}},
        rotation=RotationScheme(residual="none", values="none", heads=False, mlp=False),
        weights=WeightQuantization(scheme=scheme, clip_search=False),
        activations=_inputs(clip_ratio=0.9, symmetric=False),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def duquant_lwc() -> Recipe:
    """DuQuant+LWC W4A4KV4, its authors' second script (run_lwc.sh): alpha 0.5, and weight clipping learned in 20 epochs
    at a rate of 1e-2 in place of the fixed one."""
    changes = {
        "methods": {"duquant": {"alpha": 0.5}, "lwc": {"learning_rate": 1e-2}},
        "weights": {"scheme": {"clip_ratio": 1.0}},
    }
    return override(duquant(), changes, "duquant-lwc")


def awq() -> Recipe:
    """AWQ with 4-bit weights alone, asymmetric with one scale per output channel, as OmniQuant's and SpinQuant's tables
    have it."""
    weights = _weights(clip_search=False, symmetric=False)
    return _recipe({"awq": {}}, weights=weights, calibration=Calibration())


def awq_128g() -> Recipe:
    """AWQ with groups of 128, the setting of its own paper (INT4-g128)."""
    weights = _weights(group_size=128, clip_search=False, symmetric=False)
    return awq().model_copy(update={"weights": weights})


def llm_qat() -> Recipe:
    """LLM-QAT W4A4KV4: symmetric min-max scales per output channel, per token, and per token and head in the cache.

    The paper's scale of the cache is per token, over all heads.
    """
    cache = _cache(symmetric=True)
    weights = _weights(clip_search=False)
    return _recipe({"llm_qat": {}}, weights=weights, activations=_inputs(), keys=cache, values=cache)


def quip_sharp() -> Recipe:
    """QuIP# with 4-bit weights alone, without its fine-tuning and without the iterations of its authors' code."""
    scheme = QuantizationScheme(bits=4, granularity="tensor")
    weights = WeightQuantization(scheme=scheme, clip_search=False)
    return _recipe({"quip": {}}, weights=weights, calibration=Calibration())


def quik() -> Recipe:
    """QUIK-4B: 256 outlier features in floating point, GPTQ, every layer in 4 bits, asymmetric inputs."""
    return _recipe(
        {"outliers": {"features": 256}, "gptq": {}},
        weights=_weights(),
        activations=_inputs(symmetric=False),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def atom_128g() -> Recipe:
    """Atom: 128 reordered outlier features in INT8, groups of 128, GPTQ, input clip 0.9, asymmetric 4-bit KV cache."""
    return _recipe(
        {"outliers": {"features": 128, "bits": 8, "statistic": "square", "order": "ascending"}, "gptq": {}},
        weights=_weights(group_size=128),
        activations=_inputs(clip_ratio=0.9, group_size=128),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def spinquant_easy() -> Recipe:
    """SpinQuant-easy W4A4KV4: learned R1 and R2, merged into the weights; nothing is transformed online (Sec. 3.1).

    Activations and KV cache asymmetric without clipping (A.4); the input of o_proj has one scale per head, since R2
    turns each head by itself. GPTQ's weight clip search is the authors' code's; the paper does not speak of it.
    """
    rotation = RotationScheme(values="random_hadamard", heads=False, keys=False, mlp=False)
    return _recipe(
        {"spinquant": {}, "gptq": {}},
        rotation=rotation,
        weights=_weights(),
        activations=_inputs(symmetric=False),
        attention_output=_cache(),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def spinquant_hard() -> Recipe:
    """SpinQuant-hard W4A4KV4: the same with R3 on keys and R4 before down_proj, online Hadamard transforms."""
    return override(spinquant_easy(), {"rotation": {"keys": True, "mlp": True}}, "spinquant-hard")


def cushioncache() -> Recipe:
    """CushionCache W8A8: symmetric weights in groups of 128, asymmetric inputs with one static scale for each tensor.

    The paper does not say how large its groups are.
    """
    return _recipe(
        {"cushioncache": {}},
        weights=_weights(8, group_size=128, clip_search=False),
        activations=QuantizationScheme(bits=8, symmetric=False, granularity="tensor", dynamic=False),
        calibration=Calibration(),
    )


def qfep() -> Recipe:
    """QFeP W8A8: weights per output channel and inputs with one dynamic scale for each tensor, all symmetric."""
    return _recipe(
        {"qfep": {}},
        weights=_weights(8, clip_search=False),
        activations=QuantizationScheme(bits=8, granularity="tensor"),
        calibration=Calibration(corpus="c4", samples=512, sequence_length=1024),
    )


def qoq() -> Recipe:
    """QoQ W4A8KV4 (QServe): progressive 4-bit weights in groups of 128, 8-bit inputs per token, an asymmetric 4-bit KV
    cache per head, and block inputs rotated by what is fused into weights alone."""
    fused = RotationScheme(values="none", heads=False, keys=False, mlp=False)
    return _recipe(
        {"qoq": {}},
        rotation=fused,
        weights=_weights(group_size=128, clip_search=False, symmetric=False),
        activations=_inputs(bits=8),
        keys=_cache(),
        values=_cache(),
        calibration=Calibration(),
    )


def qoq_channel() -> Recipe:
    """QoQ W4A8KV4 with one scale per output channel, and hence one level of scales."""
    return qoq().model_copy(update={"weights": _weights(clip_search=False, symmetric=False)})


def prefixquant() -> Recipe:
    """PrefixQuant W4A4KV4 without fine-tuning: outlier tokens before every text, static scales by grid search.

    Symmetric throughout: weights per output channel, inputs per tensor, KV cache per head; rotations R1 to R4.
    """
    cache = QuantizationScheme(bits=4, granularity="head", dynamic=False)
    return _recipe(
        {"prefixed_outliers": {}, "grid_weights": {}, "grid_scales": {}},
        rotation=RotationScheme(heads=False),
        weights=_weights(clip_search=False),
        activations=QuantizationScheme(bits=4, granularity="tensor", dynamic=False),
        keys=cache,
        values=cache,
        calibration=Calibration(corpus="pile", samples=8, sequence_length=1024),
    )


def prefixquant_tuned() -> Recipe:
    """PrefixQuant W4A4KV4 with block-wise fine-tuning, which begins at the scales of the grid searches (Sec. 6.1)."""
    methods = {"grid_weights": None, "grid_scales": None, "block_ap": {}}
    return override(prefixquant(), {"methods": methods}, "prefixquant-tuned")


def efficientqat() -> Recipe:
    """EfficientQAT's Block-AP with 2-bit weights alone, asymmetric in groups of 128 (PrefixQuant Sec. G)."""
    text = {"corpus": "redpajama", "samples": 4096, "sequence_length": 2048}
    weights = _weights(2, group_size=128, clip_search=False, symmetric=False)
    return _recipe({"block_ap": {"text": text, "epochs": 2, "weights": None}}, weights=weights)


def fp8() -> Recipe:
    """FP8 W8A8, what engines run on GPUs since Hopper: E4M3 weights with one scale per output channel, and E4M3 inputs
    with dynamic scales per token. It needs no calibration text."""
    scheme = QuantizationScheme(bits=8, type="float", granularity="channel")
    inputs = QuantizationScheme(bits=8, type="float")
    return Recipe(weights=WeightQuantization(scheme=scheme, clip_search=False), activations=inputs)


def fp8_static() -> Recipe:
    """FP8 W8A8 with one static scale of inputs for each layer, which covers the calibration text."""
    changes = {"activations": {"granularity": "tensor", "dynamic": False}, "calibration": {}}
    return override(fp8(), changes, "fp8-static")


def int4_per_token_head() -> Recipe:
    """vLLM's INT4 KV cache of that name alone, to its bits: keys and values after a random Hadamard transform of fixed
    signs, asymmetric by token and head. `vllm serve --kv-cache-dtype int4_per_token_head` has it."""
    cache = _cache().model_copy(update={"rule": "vllm"})
    return Recipe(keys=cache, values=cache)


def mxfp4() -> Recipe:
    """MXFP4 weights and inputs to nearest: 4-bit floats in groups of 32 with a power of two for scale (OCP Microscaling
    1.0). It needs no calibration text."""
    scheme = QuantizationScheme(bits=4, type="float", granularity="group", group_size=32)
    return Recipe(weights=WeightQuantization(scheme=scheme, clip_search=False), activations=scheme)


def nvfp4() -> Recipe:
    """NVFP4 weights and inputs to nearest: 4-bit floats in groups of 16 with 8-bit scales, and one scale a tensor,
    which of inputs covers the calibration text, as engines have it."""
    weights = {"scheme": {"group_size": 16}}
    changes = {"weights": weights, "activations": {"group_size": 16, "dynamic": False}, "calibration": {}}
    return override(mxfp4(), changes, "nvfp4")


def mr_gptq() -> Recipe:
    """MR-GPTQ (Egiazarian et al. 2025) with NVFP4: Hadamard blocks of the size of a group on every input, GPTQ in the
    order of activations with scales of least squared error. MXFP4 has 32 in place of each 16, and dynamic inputs."""
    changes = {
        "rotation": {"residual": "none", "inputs": 16, "values": "none", "heads": 16, "keys": False, "mlp": 16},
        "methods": {"gptq": {"act_order": True, "group_scales": "static"}},
        "weights": {"scheme": {"scale": "mse"}},
    }
    return override(nvfp4(), changes, "mr-gptq")


PRESETS: dict[str, Callable[[], Recipe]] = {
    "baseline": baseline,
    "rtn": rtn,
    "gptq": gptq,
    "gptq-w4a16": gptq_w4a16,
    "smoothquant": smoothquant,
    "omniquant": omniquant,
    "duquant": duquant,
    "duquant-lwc": duquant_lwc,
    "awq": awq,
    "awq-128g": awq_128g,
    "llm-qat": llm_qat,
    "quip-sharp": quip_sharp,
    "quik": quik,
    "quarot": quarot,
    "quarot-rtn": quarot_rtn,
    "quarot-128g": quarot_128g,
    "quarot-w4a16": quarot_w4a16,
    "quarot-w4a16-tuned": quarot_w4a16_tuned,
    "atom-128g": atom_128g,
    "spinquant-easy": spinquant_easy,
    "spinquant-hard": spinquant_hard,
    "cushioncache": cushioncache,
    "qfep": qfep,
    "qoq": qoq,
    "qoq-channel": qoq_channel,
    "prefixquant": prefixquant,
    "prefixquant-tuned": prefixquant_tuned,
    "efficientqat": efficientqat,
    "fp8": fp8,
    "fp8-static": fp8_static,
    "int4-per-token-head": int4_per_token_head,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "mr-gptq": mr_gptq,
}


def all_presets() -> dict[str, Callable[[], Recipe]]:
    """The recipes above, and those that come with a method (`Method.presets`), by name.

    Raises:
        RecipeError: a method that another package registers has a defect, or a recipe of its has a name from above.
    """
    registered = {name: make for method in method_names() for name, make in find_method(method).presets().items()}
    twice = next((name for name in registered if name in PRESETS), None)
    if twice is not None:
        raise RecipeError(f"a registered method brings the recipe {twice!r}, a name that is taken: give it another.")
    return PRESETS | registered


@functools.cache
def preset(name: str) -> Recipe:
    """The recipe of a published method.

    Raises:
        RecipeError: for an unknown name; the sentence lists the nearest ones.
    """
    known = PRESETS if name in PRESETS else all_presets()
    if name not in known:
        raise RecipeError(f"unknown method {name!r}{nearest(name, list(known))}.")
    return known[name]()

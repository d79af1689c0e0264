"""A recipe in one line of words, for the settings section of a page."""

from rotquant.recipes import Recipe
from rotquant.schemes import QuantizationScheme, RotationScheme, WeightQuantization


def settings(recipe: Recipe) -> str:
    """All settings of a recipe, in the order in which they act."""
    parts = []
    if recipe.rotation:
        parts.append(_rotation(recipe.rotation))
    if recipe.smoothing:
        parts.append(f"smoothing alpha {recipe.smoothing.alpha:g}")
    if recipe.omniquant:
        omni = recipe.omniquant
        rates = f"lr {omni.clipping_lr:g} clipping, {omni.transformation_lr:g} transformation"
        parts.append(
            f"OmniQuant {omni.steps} steps of {omni.batch_size} a block, {rates}, start alpha {omni.smoothing_alpha:g}"
        )
    if recipe.outliers:
        kept = "floating point" if recipe.outliers.bits == 16 else f"{recipe.outliers.bits} bits"
        parts.append(f"{recipe.outliers.features} outlier features in {kept}, ranked by {recipe.outliers.statistic}")
    if recipe.weights:
        parts.append(f"weights {_weights(recipe.weights)}")
    for name in ("activations", "keys", "values"):
        scheme = getattr(recipe, name)
        if scheme:
            parts.append(f"{name} {_scheme(scheme)}{'' if scheme.dynamic else ', static'}")
    if recipe.needs_calibration and recipe.calibration:
        text = recipe.calibration
        parts.append(f"calibration {text.samples} x {text.sequence_length} tokens, seed {text.seed}")
    return "; ".join(parts) or "the model as it is"


def _rotation(rotation: RotationScheme) -> str:
    kinds = {"hadamard": "randomized Hadamard", "orthogonal": "random orthogonal"}
    fused = [f"R1 {kinds[rotation.residual]}"] if rotation.residual != "none" else []
    fused += ["R2"] if rotation.values else []
    switches = (("heads", rotation.heads), ("R3", rotation.keys), ("R4", rotation.mlp))
    online = [name for name, on in switches if on]
    text = f"rotation {', '.join(fused) or 'none fused'}"
    text += f"; online {', '.join(online)} in {rotation.online_dtype}" if online else ""
    return text + ("; embeddings centred" if rotation.center_embeddings else "")


def _weights(weights: WeightQuantization) -> str:
    gptq = weights.gptq
    if gptq is None:
        method = "RTN"
    else:
        order = ", activation order" if gptq.act_order else ""
        groups = f", group scales {gptq.group_scales}" if weights.scheme.granularity == "group" else ""
        inputs = ", on quantized inputs" if gptq.hessian_inputs == "quantized" else ""
        method = f"GPTQ (block {gptq.block_size}, damping {gptq.damping:.0%}{order}{groups}{inputs})"
    clip = f", clip search in norm {weights.clip_norm:g}" if weights.clip_search else ""
    return f"{_scheme(weights.scheme)}, {method}{clip}"


def _scheme(scheme: QuantizationScheme) -> str:
    sort = "symmetric" if scheme.symmetric else "asymmetric"
    per = f"groups of {scheme.group_size}" if scheme.granularity == "group" else f"per {scheme.granularity}"
    clip = f", clip {scheme.clip_ratio:g}" if scheme.clip_ratio != 1 else ""
    return f"{scheme.bits}-bit {sort} {per}{clip}"

"""What compressed-tensors and the engines that read it cannot say of a recipe, each told in one sentence.

`transformers` is transformers with `rotquant.serving`, which runs everything that the format can store. `vllm` follows
vLLM 0.33.0 as its source reads (docs/serving.md has what was run). `any` is what transformers and vLLM run without
rotquant.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, get_args

from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import Architecture
from rotquant.models.fitting import options
from rotquant.recipes.recipe import Method, Recipe
from rotquant.recipes.schemes import INPUTS, ROTATION_FIELDS, QuantizationScheme
from rotquant.recipes.transforms import Transform
from rotquant.weights.actions import Hooks, hooks
from rotquant.weights.build import declared_runtime

Engine = Literal["transformers", "vllm", "any"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
VLLM = "vLLM 0.33"


def check_engine(recipe: Recipe, architecture: Architecture, engine: str) -> None:
    """Refuse a recipe that the format or the engine cannot say, from what it says alone.

    Raises:
        RecipeError: naming the format or the engine, and what would do.
    """
    if engine not in ENGINES:
        raise RecipeError(f"no engine is called {engine!r}: choose {', '.join(ENGINES)}.")
    _check_weights(recipe, architecture)
    if engine == "transformers":
        return
    _check_beyond(recipe, engine)
    clipped = bool(declared_runtime(recipe, architecture).clips)
    problem = _problem(recipe, engine, clipped)
    if problem is not None:
        raise RecipeError(f"{problem.words}: {_remedy(recipe, engine, clipped)}.")


def _check_beyond(recipe: Recipe, engine: str) -> None:
    """Refuse methods that act at run time on more than quantizers, but transforms of inputs for vLLM."""
    for method in recipe.methods.values():
        transforms = "prefix" not in method.roles and hooks(method).attach is Hooks.attach
        if method.acts_beyond_quantizers and not (transforms and engine == "vllm"):
            why = "transformers without rotquant drops" if transforms else f"{_name(engine)} cannot do"
            raise RecipeError(
                f"{_beyond(method)} while the model runs, which {why}: export --for transformers, which runs it by "
                "rotquant.serving."
            )


@dataclass(frozen=True)
class _Problem:
    """What an engine cannot say of a recipe, as the beginning of a sentence.

    changes: values of the recipe's fields that take it away, by their paths; empty where none does.
    """

    words: str
    changes: Mapping[str, Any]


def _problem(recipe: Recipe, engine: str, clipped: bool) -> _Problem | None:
    """The first thing of a recipe that an engine other than transformers with rotquant cannot say, if any.

    clipped: whether sites' inputs have clip ratios of their own.
    """
    return _of_transforms(recipe, engine) or _of_cache(recipe) or _of_inputs(recipe, clipped)


def _remedy(recipe: Recipe, engine: str, clipped: bool) -> str:
    """What to do about all that an engine cannot say, as the end of a sentence: nothing else is in the way then."""
    changes: dict[str, Any] = {}
    while (problem := _problem(recipe, engine, clipped)) is not None:
        if problem.changes.keys() <= changes.keys():  # none, or none that helps
            return "export --for transformers, which runs it by rotquant.serving"
        inside = tuple(f"{path}." for path in problem.changes)
        kept = {path: value for path, value in changes.items() if not path.startswith(inside)}
        changes = {**kept, **problem.changes}
        for path, value in problem.changes.items():
            recipe = _with(recipe, path, value)
    made = {path: value for path, value in changes.items() if path.startswith("rotation")}
    running = {path: value for path, value in changes.items() if path not in made}
    ways = [f"quantize with {options(made)}"] * bool(made) + [f"export with {options(running)}"] * bool(running)
    return f"{' and '.join(ways)}, or export --for transformers"


def _with(recipe: Recipe, path: str, value: Any) -> Recipe:
    """A recipe with another section or field of one, of the same weights: what methods ask of these counted before."""
    section, _, field = path.partition(".")
    return recipe.model_copy(
        update={section: getattr(recipe, section).model_copy(update={field: value}) if field else value}
    )


def acts_at_run_time(recipe: Recipe) -> bool:
    """Whether anything acts while the model runs: then transformers alone would compute another function."""
    quantizers = (recipe.activations, recipe.keys, recipe.values)
    return bool(undone(recipe)) or any(quantizers) or any(method.acts_at_run_time for method in recipe.methods.values())


def storage(recipe: Recipe, engine: str) -> str:
    """The format of the weights: packed, but for 8-bit floats, and for W8A8, whose integers the kernels of vLLM and
    CUTLASS read as they are."""
    weights, inputs = recipe.rounded.scheme, recipe.activations
    if weights.fp4:
        return f"{weights.fp4.lower()}-pack-quantized"
    if weights.type == "float":
        return "float-quantized"
    return "int-quantized" if engine != "transformers" and inputs and _is_w8a8(weights, inputs) else "pack-quantized"


def _is_w8a8(weights: QuantizationScheme, inputs: QuantizationScheme) -> bool:
    by_row = weights.granularity in ("tensor", "channel") and weights.symmetric
    by_token = inputs.granularity == "token" if inputs.dynamic else inputs.granularity == "tensor"
    return by_row and by_token and weights.bits == inputs.bits == 8


def _check_weights(recipe: Recipe, architecture: Architecture) -> None:
    """Refuse weights that compressed-tensors has no form for."""
    if "experts" in architecture.traits:
        raise RecipeError(
            "transformers keeps a layer's experts in one parameter, of which compressed-tensors describes no parts: "
            f"{_instead(recipe)}."
        )
    if recipe.weights is None:
        raise RecipeError(f"the recipe quantizes no weights, so there is nothing to pack: {_instead(recipe)}.")
    for method in recipe.methods.values():
        if "rounding" in method.roles and method.stored_as != "integers":
            raise RecipeError(
                f"the method {method.name} stores weights as a {method.stored_as}, for which compressed-tensors has no "
                f"form: {_instead(recipe)}."
            )
        if "selection" in method.roles:
            raise RecipeError(
                f"the method {method.name} keeps outlier features in higher precision, which "
                f"compressed-tensors cannot say: quantize with --set methods.{method.name}=null."
            )
        if method.reorders(recipe):
            raise RecipeError(
                f"the method {method.name} forms groups of reordered columns, which compressed-tensors and vLLM have "
                "given up: quantize with --set weights.scheme.granularity=channel --set weights.scheme.group_size=null."
            )
    size = recipe.weights.scheme.group_size
    for site in architecture.sites:
        if size and site.features % size:
            raise RecipeError(
                f"groups of {size} do not divide the {site.features} features of {site.name}, which compressed-tensors "
                f"asks for: quantize with {options(_groups_that_divide(size, architecture))}."
            )


def _groups_that_divide(size: int, architecture: Architecture) -> dict[str, Any]:
    """Changes of a recipe by which its groups of weights divide the features of every site."""
    common = gcd(size, *(site.features for site in architecture.sites))
    if common == 1:
        return {"weights.scheme.granularity": "channel", "weights.scheme.group_size": None}
    return {"weights.scheme.group_size": common}


def _instead(recipe: Recipe) -> str:
    """Where weights go that compressed-tensors has no form for, as the end of a sentence."""
    if undone(recipe) or any(method.acts_beyond_quantizers for method in recipe.methods.values()):
        return "run the quantized folder itself, since a plain checkpoint cannot hold what acts at run time either"
    return "export with --format plain"


def check_methods(recipe: Recipe, why: str) -> None:
    """Refuse methods that act at run time on more than quantizers; `why` ends the sentence, after "which"."""
    for method in recipe.methods.values():
        if method.acts_beyond_quantizers:
            raise RecipeError(f"{_beyond(method)} while the model runs, which {why}.")


def undone(recipe: Recipe) -> tuple[Transform, ...]:
    """The online transforms that the weights undo. R3 turns queries and keys alike: it may stay away."""
    return tuple(one for one in recipe.transforms if one.online and one.location != "queries_keys")


def check_undone(recipe: Recipe, why: str) -> None:
    """Refuse weights that are of no use without transforms at run time; `why` ends the clause that names these.

    Only the error of a quantized cache depends on R3.
    """
    online = undone(recipe)
    if online:
        fields = ", ".join(dict.fromkeys(f"rotation.{ROTATION_FIELDS[one.name]}" for one in online))
        raise RecipeError(
            f"the weights undo transforms at run time ({fields}), which {why}: quantize with "
            f"{options(_without(online))}."
        )


def _without(online: tuple[Transform, ...]) -> dict[str, Any]:
    """The changes of a recipe that leave transforms out."""
    fields = dict.fromkeys(ROTATION_FIELDS[one.name] for one in online)
    return {f"rotation.{field}": "none" if field == "inputs" else False for field in fields}


def _beyond(method: Method) -> str:
    what = "puts a prefix before every text" if "prefix" in method.roles else "transforms what layers read"
    return f"the method {method.name} {what}"


def _of_transforms(recipe: Recipe, engine: str) -> _Problem | None:
    """Online transforms that an engine would drop."""
    online = undone(recipe)
    if not online or engine != "any":
        return None
    words = f"{_names(online)} act while the model runs, and transformers without rotquant drops them"
    return _Problem(words, _without(online))


def _of_cache(recipe: Recipe) -> _Problem | None:
    quantized = [name for name in ("keys", "values") if getattr(recipe, name) is not None]
    if not quantized:
        return None
    words = (
        f"the recipe quantizes the KV cache to integers, and {VLLM} reads a scheme of 8-bit floats alone and chooses "
        "the cache's type when it serves"
    )
    return _Problem(words, dict.fromkeys(quantized))


def _of_inputs(recipe: Recipe, clipped: bool) -> _Problem | None:
    """Quantizers of inputs that vLLM has no kernel for, or would take for others."""
    inputs, weights = recipe.activations, recipe.rounded.scheme
    if inputs is None:
        return None
    if recipe.attention_output is not None:
        words = f"o_proj has a quantizer of its own for each head, which {VLLM} has not"
        return _Problem(words, {"attention_output": None})
    if clipped:
        words = f"each site's inputs are clipped to a learned share, which compressed-tensors and so {VLLM} cannot say"
        return _Problem(words, {"activations": None})
    if inputs.dynamic and inputs.clip_ratio != 1.0:
        words = f"inputs are clipped to {inputs.clip_ratio:g} of their range, which compressed-tensors and so {VLLM} "
        return _Problem(f"{words}cannot say", {"activations.clip_ratio": 1.0})
    if inputs.fp4 and inputs.scale != "paper":
        words = f"scales of inputs are chosen by {inputs.scale}, which compressed-tensors and so {VLLM} cannot say"
        return _Problem(words, {"activations.scale": "paper"})
    if inputs.fp4 == "NVFP4" and inputs.dynamic:
        words = f"each token has an NVFP4 scale of its own, and {VLLM} reads a static one of the tensor"
        return _Problem(words, {"activations": None})
    if inputs.fp4 or (_is_w8a8(weights, inputs) and inputs.zero_point == "whole"):
        return None
    integers = inputs.type == "int" and inputs.symmetric and inputs.bits in (4, 8)
    if integers and inputs.dynamic and inputs.granularity in ("token", "group"):
        return None
    kind = "symmetric" if inputs.symmetric else "asymmetric"
    when = "dynamic" if inputs.dynamic else "static"
    words = (
        f"inputs are {kind} INT{inputs.bits} by {inputs.granularity} with {when} scales, and {VLLM} reads next to "
        f"INT{weights.bits} weights symmetric INT4 or INT8 by token or group with dynamic ones"
    )
    if weights.type == "float":
        words = f"FP8 inputs are by {inputs.granularity} with {when} scales, and {VLLM} reads dynamic ones by token or "
        words += "static ones by tensor next to weights by channel or tensor"
    return _Problem(words, {"activations": None})


def _names(transforms: tuple[Transform, ...]) -> str:
    words = {"heads": "the transform across heads"} | dict.fromkeys(INPUTS, "the transforms of inputs")
    return " and ".join(dict.fromkeys(words.get(one.name, one.name) for one in transforms))


def _name(engine: str) -> str:
    return VLLM if engine == "vllm" else f"neither transformers without rotquant nor {VLLM}"

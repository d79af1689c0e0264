"""Recipes that every family of models is asked with."""

from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe
from tests.helpers.models import tiny_tokens

SAMPLES = tiny_tokens(batch=4, tokens=24, seed=5)

#: Presets of floats, and of vLLM's 4-bit cache, with the largest change of tiny models' logits beside their own size:
#: three bits of mantissa leave an error of up to a sixteenth in each number, one bit of up to a quarter.
FLOATS = dict.fromkeys(("fp8", "fp8-static", "int4-per-token-head"), 0.2)
FLOATS |= dict.fromkeys(("mxfp4", "nvfp4", "mr-gptq", "wush"), 1.0)


def method(name: str, bits: int | None = None) -> Recipe:
    """A preset with groups of 4, 4 outlier features and little calibration; with `bits`, all so wide and unclipped."""

    def scaled(settings: dict[str, object]) -> dict[str, object]:
        small = {"group_size": 4, "features": 4, "steps": 2, "samples": 4, "sequence_length": 24, "clip_grid": 4}
        small |= {
            "block_size": 4,
            "epochs": 2,
            "batch_size": 4,
            "start_samples": 2,
            "prompt": 4,
            "search_steps": 16,
            "coarse": 3,
            "fine": 2,
            "kept_first": 2,
            "kept_recent": 4,
        }
        if FLOATS.get(name) == 1.0:  # which have their own groups, and no other width
            del small["group_size"]
        elif bits is not None and settings.get("rule") != "vllm":
            small |= {"bits": bits, "clip_ratio": 1.0, "scale_lr": 1e-9, "weight_lr": 1e-9}  # of block_ap
        for key, value in settings.items():
            if isinstance(value, dict):
                settings[key] = scaled(value)
            elif type(value) is int and key in ("inputs", "heads", "mlp", "block"):  # of features
                settings[key] = 4
            elif value and key in small:
                settings[key] = small[key]
        return settings

    return Recipe.model_validate(scaled(preset(name).model_dump()))

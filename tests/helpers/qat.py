"""Small quantization-aware trainings."""

import torch

from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.weights.build import build_weights
from tests.helpers.models import tiny_model, tiny_tokens

TEXT = tiny_tokens(batch=8)


AMOUNTS = {
    "text": {"samples": 8, "sequence_length": 24},
    "epochs": 3,
    "batch_size": 4,
    "start_samples": 4,
    "weight_lr": 1e-3,
    "confidence": "labels",
    "temperature": None,
    "validation_share": 0.0,
    "gradient_norm": None,
}


#: What BitDistiller's authors do beside the paper, the defaults.
AUTHORS = {
    "confidence": "largest",
    "temperature": 0.7,
    "prompt": 6,
    "validation_share": 0.25,
    "validate_every": 2,
    "gradient_norm": 1e-2,
}


#: A recipe of every kind of quantizer there is.
KINDS = {
    "range": ("bitdistiller", 2, {}),
    "nf3": ("bitdistiller-rotated", 3, {}),
    "learned_range": ("rcp", 2, {"quantizer": "lwc"}),
    "ldp": ("rcp", 2, {}),
    "lwc_exact": ("rcp", 2, {"quantizer": "lwc_exact"}),
    "nothing": ("rcp", 2, {"learned": "nothing"}),
    "ramp": ("rcp", 2, {"straight_through": "ramp"}),
    "n2uq": ("rcp", 2, {"quantizer": "n2uq"}),
    "nf3_ldp": ("rcp", 3, {}),
    "factorized": ("rcp", 2, {"factorized": True}),
    "authors": ("bitdistiller", 2, AUTHORS),
}


def recipe(kind="ldp", **changes):
    """A recipe with amounts for tiny models, whose changes are of its method."""
    name, bits, settings = KINDS[kind]
    (method,) = preset(name).methods
    rates = {"quantizer_lr": 1e-2} if method == "rcp" else {}
    own = {**AMOUNTS, **rates, **settings, **changes}
    return override(
        preset(name), {"methods": {method: own}, "weights": {"scheme": {"bits": bits, "group_size": 16}}}, "test"
    )


def name_of(of):
    (name,) = of.methods
    return name


def build(of, model=None, text=TEXT, **options):
    model = model or tiny_model(dtype=torch.float64)
    return build_weights(model, None, of, 0, texts={name_of(of): text}, progress=False, **options)

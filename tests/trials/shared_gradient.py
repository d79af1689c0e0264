"""How much of the gradient by which SpinQuant learns R1 other text shares: where that is little, steps go at random.

Sequences of 512 tokens go to four parts in turn. Each part's gradient G at the random start R gives the tangent
G R^T - R G^T, along which a step turns R1; the cosine of two tangents is the share of what they have in common.

    python -m tests.trials.shared_gradient MODEL TEXT [--sequences 16] [--only RE] [--device cuda]
"""

import argparse
import re
from itertools import combinations
from pathlib import Path
from statistics import mean, stdev
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.rotation.matrices import Rotations, initial_rotations
from rotquant.models.rotation.network import Gradient, quantized_network
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import Recipe, override
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors.faster import FasterKernels
from rotquant.weights.clipping import clips_of

TOKENS, PARTS = 512, 4
HARD = preset("spinquant-hard")


def bits(inputs: int) -> Recipe:
    """SpinQuant-hard with so many bits for inputs, keys and values."""
    return override(HARD, {name: {"bits": inputs} for name in ("activations", "keys", "values")}, "trial")


#: Inputs as QuaRot quantizes them.
SYMMETRIC = override(HARD, {"activations": {"symmetric": True, "clip_ratio": 0.9}}, "trial")
#: Recipes, what gradients are of, and whether the network has rounded weights.
CASES: dict[str, tuple[Recipe, Gradient, bool]] = {
    "8-bit inputs and cache": (bits(8), "errors", False),
    "4 bits": (HARD, "errors", False),
    "4 bits, inputs symmetric and clipped": (SYMMETRIC, "errors", False),
    "4 bits, gradients of scales": (HARD, "scales", False),
    "3 bits": (bits(3), "errors", False),
    "4 bits, 4-bit weights to nearest": (HARD, "errors", True),
}


def tangents(model: nn.Module, ids: Tensor, recipe: Recipe, gradient: Gradient, weights: bool) -> list[Tensor]:
    """The tangents of the parts, [hidden, hidden], of token ids [sequences, tokens]."""
    start = initial_rotations(architecture_of(model), cast(RotationScheme, recipe.rotation), 0).tensors()
    learned = {name: nn.Parameter(matrix.to(ids.device, torch.float32)) for name, matrix in start.items()}
    rounded = {"weights": recipe.rounded.scheme, "clips": clips_of(recipe.rounded)} if weights else {}
    found, rotation = [], learned["residual"]
    rotations = Rotations.of_tensors(learned, exact=False)
    with FasterKernels(), quantized_network(model, recipe, rotations, gradient=gradient, **rounded):
        for part in range(PARTS):
            for one in ids[part::PARTS]:
                logits = model(input_ids=one[None], use_cache=False).logits[0]
                cross_entropy(logits[:-1].float(), one[1:]).backward()
            turned = cast(Tensor, rotation.grad) @ rotation.detach().T
            found.append(turned - turned.T)
            for parameter in learned.values():
                parameter.grad = None
    return found


def main() -> None:
    """Print each case's cosines: of parts, and of halves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model, tokenizer = load_checkpoint(options.model, torch.float32, options.device)
    text = options.text.read_text(encoding="utf-8")[: options.sequences * TOKENS * 8]
    ids = torch.tensor(tokenizer(text)["input_ids"][: options.sequences * TOKENS], device=options.device)
    for name, case in CASES.items():
        if re.search(options.only, name):
            a, b, c, d = parts = tangents(cast(nn.Module, model), ids.view(-1, TOKENS), *case)
            halves = ((a + b, c + d), (a + c, b + d), (a + d, b + c))
            for kind, pairs in (("quarters", [*combinations(parts, 2)]), ("halves", halves)):
                shared = [cosine_similarity(x.flatten(), y.flatten(), dim=0).item() for x, y in pairs]
                print(f"{name}: {kind} {mean(shared):.3f} ± {stdev(shared):.3f}", flush=True)


if __name__ == "__main__":
    main()

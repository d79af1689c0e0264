"""Which settings of 4-bit weights cost a pretrained model least: a search for gptq-w4a16, quarot-w4a16 and its tuning.

It reads ROTQUANT_REAL_MODELS and ROTQUANT_REAL_TEXT as `tests.trials.real` does. Each trial is one setting on one model
with one sample of the train split, judged on the validation split, in KL divergence from full precision; the test split
is never read. Records are lines of a file, so that an interrupted search goes on where it was.

    python -m tests.trials.weights_alone RECORDS MODEL [--only RE] [--seeds 3] [--samples 32] [--device cuda]
"""

import argparse
import json
import os
import re
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from rotquant import api
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.text.loading import corpus_spec

#: Tokens of windows of the validation split that judge, and of calibration samples.
TOKENS = 512
#: Trials of each preset: groups, divisor of the scale, clip search, and order of rounding.
CHOSEN = [
    *product(["channel"], ["max/7", "max/7.5"], ["no clip", "MSE clip"], ["natural order"]),
    *product(["groups"], ["max/7", "max/7.5"], ["no clip", "MSE clip"], ["natural order", "static order"]),
]
PRESETS = ("gptq-w4a16", "quarot-w4a16")
#: Trials of block-wise training: learning rates of weights and of scales, epochs, and the loss.
TUNED = list(product(("5e-05", "0.0001", "0.0002", "0.0004"), ("2e-05", "0.0001"), (4, 12), ("mse", "relative")))


def trials(model: str, samples: int, bos: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Presets and their changes, by words; samples: of calibration; bos: where texts have that token."""
    size = 64 if model.startswith("smollm2") else 128  # which divides every width of the model
    text = {"samples": samples, "sequence_length": TOKENS, "bos": bos}
    rounded = {
        "; ".join([name, *words]): (name, {**changes(*words, size), "calibration": text})
        for name, words in product(PRESETS, CHOSEN)
    }
    return rounded | {
        f"quarot-w4a16-tuned; weights {weights}, scales {scales}; {epochs} epochs; {loss} loss": (
            "quarot-w4a16-tuned",
            {
                "weights": {"scheme": {"group_size": size}},
                "methods": {
                    "block_ap": {
                        "text": text,
                        "weight_lr": float(weights),
                        "scale_lr": float(scales),
                        "epochs": epochs,
                        "loss": loss,
                    }
                },
            },
        )
        for weights, scales, epochs, loss in TUNED
    }


def changes(groups: str, divisor: str, clip: str, order: str, size: int) -> dict[str, Any]:
    """What the words of a trial say of a recipe; size: of groups."""
    grouped, static = groups == "groups", order == "static order"
    scheme = {"granularity": "group" if grouped else "channel", "group_size": size if grouped else None}
    scheme["scale"] = "full" if divisor == "max/7.5" else "paper"
    rounding = {"act_order": static, "group_scales": "static" if static else "updated"}
    return {"weights": {"scheme": scheme, "clip_search": clip == "MSE clip"}, "methods": {"gptq": rounding}}


def main() -> None:
    """Run the trials that are asked for and not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("model")
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    checkpoint = Path(os.environ["ROTQUANT_REAL_MODELS"]) / options.model
    corpus = corpus_spec(os.environ["ROTQUANT_REAL_TEXT"])
    bos = "window" if api.load_tokenizer(checkpoint).bos_token else "text"
    judged = {"split": "validation", "sequence_length": TOKENS, "max_windows": options.windows, "bos": bos}
    check = Perplexity(corpus=corpus.name, **judged)
    read = options.records.read_text().splitlines() if options.records.exists() else ()
    done = {(one["model"], one["trial"], one["seed"]) for one in map(json.loads, read)}
    for seed in range(options.seeds):
        for words, (name, made) in trials(options.model, options.samples, bos).items():
            if (options.model, words, seed) in done or not re.search(options.only, words):
                continue
            recipe, _ = api.fit(checkpoint, override(preset(name), made, words))
            begin = time.perf_counter()
            options_of = {"seed": seed, "device": options.device, "dtype": torch.bfloat16}
            cost = api.quantize(checkpoint, recipe, corpus=corpus, check=check, **options_of).cost()
            row = {
                "model": options.model,
                "trial": words,
                "seed": seed,
                "kl": cost and cost.kl,
                "perplexity": cost and cost.quantized,
                "full_precision": cost and cost.full_precision,
                "seconds": time.perf_counter() - begin,
            }
            with options.records.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

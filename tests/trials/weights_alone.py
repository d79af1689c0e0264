"""Which settings of 4-bit weights cost a pretrained model least: what the presets gptq-w4a16 and quarot-w4a16 are.

It reads ROTQUANT_REAL_MODELS and ROTQUANT_REAL_TEXT as `tests.trials.real` does. Each trial is one setting on one model
with one sample of the train split, judged on the validation split, in KL divergence from full precision; the test split
is never read. Records are lines of a file, so that an interrupted search goes on where it was.

    python -m tests.trials.weights_alone RECORDS MODEL [--only RE] [--seeds 3] [--samples 32]
"""

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from rotquant import api
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override_all
from rotquant.recipes.schemes import Perplexity
from rotquant.text.loading import corpus_spec

#: Windows of 512 tokens of the validation split that judge, and calibration samples of as many.
WINDOWS, TOKENS = 8, 512
#: What a preset's rows change: divisors of the scale, clip search, groups and order of rounding.
SCALES = {"max/7": "paper", "max/7.5": "full"}
CLIPS = {"none": False, "MSE": True}
ORDERS = {
    "as they are": {"act_order": False, "group_scales": "updated"},
    "act-order, static": {"act_order": True, "group_scales": "static"},
}


def trials(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Presets and their changes, by words."""
    size = 64 if model.startswith("smollm2") else 128  # which divides every width of the model
    groups = {"channel": ("channel", None), f"groups of {size}": ("group", size)}
    return {
        f"{name}; {per}; {scale}; clip {clip}; {order}": (
            name,
            {
                "weights": {
                    "scheme": {"granularity": granularity, "group_size": width, "scale": SCALES[scale]},
                    "clip_search": CLIPS[clip],
                },
                "methods": {"gptq": ORDERS[order]},
            },
        )
        for name in ("gptq-w4a16", "quarot-w4a16")
        for per, (granularity, width) in groups.items()
        for scale in SCALES
        for clip in CLIPS
        for order in ORDERS
    }


def main() -> None:
    """Run the trials that are asked for and not recorded yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("model")
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=32)
    options = parser.parse_args()
    checkpoint = Path(os.environ["ROTQUANT_REAL_MODELS"]) / options.model
    corpus = corpus_spec(os.environ["ROTQUANT_REAL_TEXT"])
    check = Perplexity(corpus=corpus.name, split="validation", sequence_length=TOKENS, max_windows=WINDOWS)
    read = options.records.read_text().splitlines() if options.records.exists() else ()
    done = {(one["model"], one["trial"], one["seed"]) for one in map(json.loads, read)}
    text = {"calibration": {"samples": options.samples, "sequence_length": TOKENS}}
    for seed in range(options.seeds):
        for words, (name, changes) in trials(options.model).items():
            if (options.model, words, seed) in done or not re.search(options.only, words):
                continue
            recipe, _ = api.fit(checkpoint, override_all(preset(name), [changes, text], words))
            begin = time.perf_counter()
            cost = api.quantize(checkpoint, recipe, corpus=corpus, seed=seed, check=check).cost()
            row = {
                "model": options.model,
                "trial": words,
                "seed": seed,
                "kl": cost.kl,
                "perplexity": cost.quantized,
                "full_precision": cost.full_precision,
                "seconds": time.perf_counter() - begin,
            }
            with options.records.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

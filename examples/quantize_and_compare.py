"""Quantize a model by three methods and compare each with the original on the same text.

    rotquant corpus modules -o text/                              # what the shipped models were trained on
    python examples/quantize_and_compare.py --corpus text/        # a shipped model: a minute on a laptop
    python examples/quantize_and_compare.py MODEL --corpus TEXT   # yours: a folder or hub id, and a text of yours

Printed for each method: the rise of perplexity with its standard error, the KL divergence from the original's
predictions, how often the likeliest next token changes, and how many bits a weight takes with its scales.
"""

import argparse
import tempfile
from pathlib import Path

from rotquant import api
from rotquant.comparison import compare, window_length
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Perplexity
from rotquant.text import corpus_spec

SHIPPED = Path(__file__).parents[1] / "workflow/resources/models/rq-7b"
#: 4-bit weights, inputs and KV cache: rounded to nearest, after QuaRot's random rotation, and with GPTQ.
METHODS = ("rtn", "quarot-rtn", "quarot")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SHIPPED))
    parser.add_argument("--corpus", required=True, help="as of `rotquant evaluate`")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="of `rotquant methods`")
    parser.add_argument("--windows", type=int, default=8, help="windows of test text")
    parser.add_argument("--length", type=int, default=512, help="tokens in a window, and in a calibration sample")
    parser.add_argument("--samples", type=int, default=16, help="calibration samples; the papers take 128")
    given = parser.parse_args()

    corpus = corpus_spec(given.corpus)
    length = window_length([given.model], given.length)
    metric = Perplexity(corpus=corpus.name, sequence_length=length, max_windows=given.windows)
    print(f"{'method':>12}  {'perplexity':>20}  {'KL, nats':>18}  {'flips':>6}  {'bits':>5}")
    with tempfile.TemporaryDirectory() as folder:
        for method in given.methods:
            # A preset is a recipe, which is data: any field changes by its path, here the calibration text.
            recipe = preset(method)
            if recipe.calibration is not None:
                text = {"samples": given.samples, "sequence_length": length}
                recipe = override(recipe, {"calibration": text}, "this example")
            # Heads or widths without a Hadamard matrix leave a transform out; the note says which.
            recipe, note = api.fit(given.model, recipe)
            api.quantize(given.model, recipe, corpus=corpus).save(Path(folder) / method)
            (found,) = compare(given.model, [Path(folder) / method], corpus, metric=metric).models
            rise, kl = (f"{mean:.3f} ± {error:.3f}" for mean, error in (found.ratio, found.kl))
            perplexity = f"{found.perplexity.perplexity:.2f} (x {rise})"
            flips, bits = f"{found.flips[0]:5.1f}%", f"{found.bits_per_weight:5.2f}"
            print(f"{method:>12}  {perplexity:>20}  {kl:>18}  {flips}  {bits}  {note}")


if __name__ == "__main__":
    main()

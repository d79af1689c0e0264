"""Learn a rotation by SpinQuant and look at what it does to the activations.

    rotquant corpus modules -o text/                                       # what the shipped models were trained on
    python examples/learn_a_rotation.py --corpus text/                     # a shipped model; writes rotation.svg
    python examples/learn_a_rotation.py MODEL --corpus TEXT --steps 100    # yours

Printed: the perplexity of the quantized model with the rotation as drawn and as learned, on test text. The figure has
two parts. Left: the loss of the quantized network while Cayley SGD turns the rotation, each step on other text. Right:
the largest value of each feature of the residual stream, sorted: as it is, after the random Hadamard rotation where
learning begins, and after the learned one. One scale serves all features of a token, so 4 bits need a flat line.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")  # no window, so that it runs anywhere
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from rotquant import api
from rotquant.models.architectures import architecture_of
from rotquant.models.checkpoints import load_checkpoint
from rotquant.models.rotation.matrices import initial_rotations, load_history, load_rotations
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override
from rotquant.recipes.schemes import Calibration, Perplexity
from rotquant.text import corpus_spec

SHIPPED = Path(__file__).parents[1] / "workflow/resources/models/rq-7b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SHIPPED))
    parser.add_argument("--corpus", required=True, help="as of `rotquant quantize`")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--output", type=Path, default=Path("rotation.svg"))
    given = parser.parse_args()

    # A preset with other settings. These learn within few steps on small models; without them it is the paper's.
    text = {"samples": 4 * given.steps, "sequence_length": given.length}
    settings = {"steps": given.steps, "batch_size": 4, "learning_rate": 3.0, "gradient": "scales", "text": text}
    settings["targets"] = "predictions"  # of the float network, in place of the text's next tokens
    recipe = override(preset("spinquant-easy"), {"methods": {"spinquant": settings, "gptq": None}}, "this example")
    as_drawn = override(recipe, {"methods": {"spinquant": None}}, "this example")

    # The file keeps R1 and R2 with their history; recipes share it, and an interrupted learning continues.
    file = given.output.with_suffix(".safetensors")
    corpus, few = corpus_spec(given.corpus), Calibration(samples=4, sequence_length=given.length)
    metric = Perplexity(corpus=corpus.name, sequence_length=given.length, max_windows=16)
    for name, chosen, kept in (("as drawn", as_drawn, None), ("learned", recipe, file)):
        model = api.quantize(given.model, chosen, corpus=corpus, rotations=kept)
        print(f"rotation {name}: perplexity {api.perplexity(model, corpus, metric).perplexity:.3f}")
    learned, losses = load_rotations(file), [step["loss"] for step in load_history(file)]

    network, tokenizer = load_checkpoint(given.model, torch.float32)
    stream = residual_stream(network, api.calibration_tokens(corpus, few, tokenizer))
    drawn = initial_rotations(architecture_of(network), recipe.rotation, seed=0)
    lines = {
        "as it is": largest(stream),
        "random Hadamard rotation": largest(stream @ drawn.residual),
        "learned rotation": largest(stream @ learned.residual),
    }
    for name, values in lines.items():
        print(f"{name}: largest feature {values[0] / values.median():.1f} times the median one")
    draw(losses, lines, given.output)
    print(given.output)


@torch.no_grad()
def residual_stream(network: torch.nn.Module, windows: Tensor) -> Tensor:
    """The input of the middle decoder layer, float64 [tokens, features], without first tokens, which are outliers."""
    states = network(windows, output_hidden_states=True).hidden_states
    return states[len(states) // 2][:, 1:].flatten(0, 1).double()


def largest(values: Tensor) -> Tensor:
    """The largest absolute value of each feature, from the largest down: [tokens, features] -> [features]."""
    return values.abs().amax(0).sort(descending=True).values


def draw(losses: list[float], lines: dict[str, Tensor], output: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, color="#0072B2")
    left.set(xlabel="step", ylabel="loss of the quantized network, nats", title="learning, each step on other text")
    for (name, values), color in zip(lines.items(), ("#555555", "#E69F00", "#0072B2"), strict=True):
        right.plot(values, label=name, color=color)
    right.set(xlabel="feature, sorted", ylabel="largest absolute value", yscale="log", title="residual stream")
    right.legend(frameon=False)
    figure.savefig(output)


if __name__ == "__main__":
    main()

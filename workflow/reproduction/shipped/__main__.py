"""Entry point of `python -m rotquant.training RECIPE -o DIR`, without the dependencies of the command line."""

import argparse
from pathlib import Path

from reproduction.shipped import TrainingConfig, train


def main(arguments: list[str] | None = None) -> None:
    """Run `python -m rotquant.training RECIPE -o DIR`."""
    parser = argparse.ArgumentParser(description="Train a small model from a recipe.")
    parser.add_argument("recipe", type=Path, help="a YAML file such as config/training/rq-7b.yaml")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--data", type=Path, help="where the encoded corpus is kept; default: the user's cache")
    parser.add_argument("--compile", action="store_true", help="compile the step (on a GPU: one CUDA graph)")
    options = parser.parse_args(arguments)
    config = TrainingConfig.from_yaml(options.recipe)
    curve = train(config, options.output, options.device, data_dir=options.data, compile=options.compile)
    if curve is not None:
        print(f"{config.name}: validation perplexity {curve['validation_perplexity']:.3f}, {curve['seconds']:.0f} s")


if __name__ == "__main__":
    main()

"""Pretrained models, where somebody has them: folders and GGUF files in the folder that ROTQUANT_REAL_MODELS names."""

import os
from pathlib import Path

import pytest


def real_model(name: str) -> Path:
    """The folder of a pretrained model, such as "smollm2-135m"; the test is skipped where it is not here."""
    folder = Path(os.environ.get("ROTQUANT_REAL_MODELS", "")) / name
    if "ROTQUANT_REAL_MODELS" not in os.environ or not (folder / "config.json").is_file():
        pytest.skip(f"ROTQUANT_REAL_MODELS names no folder with the model {name}")
    return folder


def real_gguf(name: str) -> Path:
    """The GGUF file of a pretrained model; the test is skipped where it is not here."""
    file = Path(os.environ.get("ROTQUANT_REAL_MODELS", "")) / f"{name}.gguf"
    if "ROTQUANT_REAL_MODELS" not in os.environ or not file.is_file():
        pytest.skip(f"ROTQUANT_REAL_MODELS names no folder with the file {file.name}")
    return file

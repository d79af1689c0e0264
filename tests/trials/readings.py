"""Trial of readings: what other libraries write is read here, and each token's log-probability is that library's own.

Each format is written on the shipped rq-llama3 by the library itself, which then runs it on two windows. ROTQUANT_PEERS
is a folder with the libraries' environments, as in the trial of peers; a library without one is left out.
ROTQUANT_READING chooses cases by a regular expression.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotquant import api
from rotquant.foundation.errors import RotquantError
from tests.trials.engines import SHIPPED, log_probabilities
from tests.trials.peers import environments, in_environment
from tests.trials.trial import Trial, run

#: Windows of so many tokens of the project's own text: those that calibrate, and those that are compared.
TOKENS, SAMPLES, WINDOWS = 128, 8, 2
#: Nats by which a forward pass in bfloat16, as GPTQModel's is on a CPU, differs from one in float32.
BFLOAT16 = 3e-2


@dataclass(frozen=True)
class Case:
    """A format: who writes it, with what settings (`peers_libraries`), and by how many nats a token may differ.

    tolerance: of the mean of absolute values. Scales in float16 and products in another order are below 1e-3. Integers
    of inputs flip at ties: one of them moves a static asymmetric W8A8 by a tenth.
    """

    name: str
    library: str
    settings: Mapping[str, Any]
    tolerance: float = 1e-3


def _modifiers(*modifiers: tuple[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {"modifiers": modifiers}


def _scheme(group: int | None = 32, bits: int = 4, inputs: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """compressed-tensors' own words for weights of all linear layers but the head, and for their inputs."""
    size = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **size, **more}
    part = {"targets": ["Linear"], "weights": weights, **({"input_activations": inputs} if inputs else {})}
    return {"config_groups": {"all": part}, "ignore": ["lm_head"]}


_DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
_RANDOM = {"transform_type": "random-hadamard"}
_ROUNDED = ("QuantizationModifier", _scheme())
_ROUND_INT = {"scheme": "W4A16", "iters": 2, "group_size": 32}
CASES = (
    Case("W4A16, static order", "llmcompressor", _modifiers(("GPTQModifier", _scheme()))),
    Case(
        "W4A16, asymmetric, AWQ",
        "llmcompressor",
        _modifiers(("AWQModifier", {}), ("QuantizationModifier", _scheme(symmetric=False))),
    ),
    Case("W4A8", "llmcompressor", _modifiers(("QuantizationModifier", _scheme(None, 4, _DYNAMIC)))),
    Case(
        "W8A8, dynamic, SmoothQuant",
        "llmcompressor",
        _modifiers(("SmoothQuantModifier", {}), ("GPTQModifier", _scheme(None, 8, _DYNAMIC))),
    ),
    Case("W8A8, static", "llmcompressor", _modifiers(("GPTQModifier", _scheme(None, 8, _STATIC)))),
    Case(
        "W8A8, static, asymmetric",
        "llmcompressor",
        _modifiers(("QuantizationModifier", _scheme(None, 8, {**_STATIC, "symmetric": False}))),
        0.2,
    ),
    Case(
        "SpinQuant R1 to R4",
        "llmcompressor",
        _modifiers(("SpinQuantModifier", {"rotations": ["R1", "R2", "R3", "R4"], **_RANDOM}), _ROUNDED),
    ),
    Case(
        "SpinQuant R4 in blocks",
        "llmcompressor",
        _modifiers(("SpinQuantModifier", {"rotations": ["R1", "R2", "R4"], "transform_block_size": 32}), _ROUNDED),
    ),
    Case("QuIP", "llmcompressor", _modifiers(("QuIPModifier", {"rotations": ["v", "u"], **_RANDOM}), _ROUNDED)),
    Case(
        "QuIP by matrices",
        "llmcompressor",
        _modifiers(("QuIPModifier", {"rotations": ["v", "u"], "transform_type": "random-matrix"}), _ROUNDED),
    ),
    Case("its own format", "auto_round", _ROUND_INT, 5e-3),
    Case("compressed-tensors", "auto_round", {**_ROUND_INT, "format": "llm_compressor"}, 5e-3),
    Case("GPTQ v1", "gptqmodel", {"bits": 4, "group_size": 32, "sym": True}, BFLOAT16),
    Case("GPTQ v1, order", "gptqmodel", {"bits": 4, "group_size": 32, "sym": True, "desc_act": True}, BFLOAT16),
    Case(
        "GPTQ v2, asymmetric", "gptqmodel", {"bits": 4, "group_size": 32, "sym": False, "format": "gptq_v2"}, BFLOAT16
    ),
)


def body(trial: Trial) -> None:
    """Each format that an environment here can write."""
    known = environments()
    chosen = [one for one in CASES if re.search(os.environ.get("ROTQUANT_READING", ""), f"{one.library}, {one.name}")]
    text = (SHIPPED.parents[3] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ids = api.load_tokenizer(SHIPPED).encode(text)[: TOKENS * (SAMPLES + WINDOWS)]
    rows = torch.tensor(ids[: len(ids) // TOKENS * TOKENS]).view(-1, TOKENS).tolist()
    for case in (one for one in chosen if one.library in known):
        with tempfile.TemporaryDirectory() as place:
            trial.say(f"{case.library}, {case.name}")
            _one(trial, case, known[case.library], Path(place) / "made", rows)


def _one(trial: Trial, case: Case, python: Path, folder: Path, rows: list[list[int]]) -> None:
    """Write by the library and compare on the last rows; the others calibrate."""
    ids, windows = rows[:-WINDOWS], rows[-WINDOWS:]
    answer = in_environment(python, case.library, SHIPPED, folder, case.settings, ids, windows=windows)
    if isinstance(answer, str):
        trial.check("The library writes and runs it", False, answer)
        return
    trial.check("The library writes and runs it", True)
    trial.versions[case.library] = answer["version"]
    try:
        ours = log_probabilities(api.load(folder, dtype=torch.float32).network, windows)
    except RotquantError as error:
        trial.check("It is read", False, str(error))
        return
    apart = float((ours.detach() - torch.tensor(answer["log_probabilities"])).abs().mean())
    trial.figure(f"{case.library}, {case.name}: mean difference of log-probabilities, nats", round(apart, 6))
    trial.check("Log-probabilities are the library's own", apart <= case.tolerance, f"{case.name}: {apart:.4f} nats")


if __name__ == "__main__":
    run("readings", (__doc__ or "").splitlines()[0], body)

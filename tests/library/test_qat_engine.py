"""Processes that share a self-distillation give what one gives, and go on with equal bits after the end of one."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.qat.engine import Sharded, make_engine
from rotquant.qat.student import Distillation
from rotquant.qat.training import Training
from rotquant.training.state import Checkpoint
from tests.helpers.interrupting import Interrupted
from tests.helpers.models import tiny_model
from tests.helpers.processes import run_together
from tests.helpers.qat import build, recipe

pytestmark = [
    pytest.mark.unflipped,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]
#: With what is special: tables, biases, tied embeddings, R1 beside the weights.
CASES = {
    "ldp": ("ldp", {"family": "qwen2"}),
    "range": ("range", {"tied": True}),
    "factorized": ("factorized", {"family": "llama"}),
    "authors": ("authors", {"family": "llama"}),
}


def made(case, checkpoint=None, dtype=torch.float32, **changes):
    kind, model = CASES[case]
    return build(recipe(kind, **changes), tiny_model(**model, dtype=dtype), checkpoint=checkpoint)


def made_exactly(case):
    """In float64, quantizers' parameters too: rounding is not continuous, and there no code is left to a last bit."""
    quantizer = Training._quantizer
    Training._quantizer = lambda *arguments: quantizer(*arguments).double()
    try:
        return made(case, dtype=torch.float64)
    finally:
        Training._quantizer = quantizer


def store(stored, path):
    torch.save(
        {
            "history": json.dumps(stored.history),
            "codes": {name: weight.codes for name, weight in stored.weights.items()},
            "model": {name: p.detach() for name, p in stored.model.named_parameters()},
        },
        path,
    )


def train(rank, folder, case):
    assert isinstance(make_engine(torch.device("cpu")), Sharded)
    stored = made_exactly(case)
    assert bool(stored.weights) == (rank == 0)
    if rank == 0:
        store(stored, folder / "two")


@pytest.mark.parametrize(
    "case", [case if case == "ldp" else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_two_processes_train_as_one_does(case, tmp_path: Path):
    run_together(tmp_path, partial(train, case=case))
    two, one = torch.load(tmp_path / "two", weights_only=True), made_exactly(case)
    for found, expected in zip(json.loads(two["history"]), one.history, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            # Norms compute in float32, whose last bits shift no sum by more than this.
            assert found[name] == pytest.approx(value, rel=1e-6), (expected["step"], name)
    assert all(torch.equal(two["codes"][name], weight.codes) for name, weight in one.weights.items())
    for name, parameter in one.model.named_parameters():
        torch.testing.assert_close(two["model"][name], parameter.detach(), rtol=1e-6, atol=1e-6)


def killed(rank, folder):
    checkpoint = Checkpoint(folder / "unfinished", "this", every=2)
    straight = made("ldp")
    forward, passed = Distillation.forward, iter(range(5))

    def dying(*arguments):
        if next(passed, None) is None:
            raise Interrupted
        return forward(*arguments)

    Distillation.forward = dying
    try:
        with pytest.raises(Interrupted):
            made("ldp", checkpoint)
    finally:
        Distillation.forward = forward
    assert json.loads((folder / "unfinished.parts/latest.json").read_text()) == {"step": 4, "processes": 2}
    dist.barrier()
    resumed = made("ldp", checkpoint)
    assert resumed.history == straight.history
    assert len(resumed.history) == 6
    if rank == 0:
        for name, weight in straight.weights.items():
            assert torch.equal(weight.codes, resumed.weights[name].codes)
            assert torch.equal(weight.levels, resumed.weights[name].levels)
        pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
        parts = sorted(path.name for path in (folder / "unfinished.parts").iterdir())
        assert parts == ["latest.json", "step-6.rank-0", "step-6.rank-1"]


@pytest.mark.long
def test_killed_processes_continue_with_equal_bits_from_whole_states(tmp_path: Path):
    run_together(tmp_path, killed)


def refused(rank, folder):
    with pytest.raises(RecipeError, match="2 processes cannot share batches of 3 samples evenly"):
        made("ldp", batch_size=3)
    checkpoint = Checkpoint(folder / "unfinished", "this", every=1)
    (folder / "unfinished.parts").mkdir(exist_ok=True)
    dist.barrier()
    if rank == 0:
        (folder / "unfinished.parts/latest.json").write_text(json.dumps({"step": 1, "processes": 3}))
    dist.barrier()
    with pytest.raises(ResultError, match="is of 3 processes, and these are 2: start as many"):
        made("ldp", checkpoint)


def test_what_processes_cannot_share_is_said(tmp_path: Path):
    run_together(tmp_path, refused)

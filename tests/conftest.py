"""Shared test settings: GPU tests skip where there is no GPU, and nothing under test reaches for a hub."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes is for no test to assert. CI's own profile stays below.
settings.register_profile("tests", settings(deadline=None))
settings.load_profile("tests")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests' tensors are tiny: threads would mostly wait for each other, several times slower where cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# In the background of a script Ctrl-C is ignored, and so would be by what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Python's own thresholds cost a sixth of the time: tests make objects by the million, and hardly a cycle among them.
gc.set_threshold(20_000, 20, 100)


#: Files that take half a minute and more each, and whose subjects other tests or the trials touch too.
LONG_FILES = frozenset(
    f"test_{name}.py"
    for name in (
        "all_figures",
        "zeroshot_items",
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `tests.machines`."""
    parser.addoption("--flip-last-bits", action="store_true", help="compute with other last bits than torch's")
    parser.addoption("--long", action="store_true", help="the tests marked `long` too")
    parser.addoption("--every", type=int, default=1, help="of each test's cases only every so manieth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of files that use torch as `numeric`; skip those marked `gpu` on a machine without one."""
    for item in items:
        if item.path.name in LONG_FILES:
            item.add_marker("long")
    if not config.getoption("--long"):
        long = {item for item in items if "long" in item.keywords}
        config.hook.pytest_deselected(items=[*long])
        items[:] = [item for item in items if item not in long]
    _keep_every(config.option.every, config, items)
    # Those that start Snakemake take up to a minute each: at the end one process would wait for the other.
    items.sort(key=lambda item: item.path.name != "test_workflow.py")
    for item in items:
        if hasattr(getattr(item, "module", None), "torch"):
            item.add_marker(pytest.mark.numeric)
        if config.getoption("--flip-last-bits") and "unflipped" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="takes the last bits as torch computes them"))
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Once the tests of a file and their fixtures are gone, freeze what remains."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    """Leave what is there now, tests by the thousand, out of later collections of garbage, which take a second else."""
    gc.collect()
    gc.freeze()


def _keep_every(step: int, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of each parametrized test leave only every `step`-th, the first among them."""
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if seen[test] % step:
            left_out.append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a numeric test with its fixtures in the arithmetic that `--flip-last-bits` asks for."""
    if not (item.config.getoption("--flip-last-bits") and "numeric" in item.keywords):
        return (yield)
    from tests.helpers.last_bits import FlippedLastBits

    with FlippedLastBits():
        return (yield)


@pytest.fixture(autouse=True)
def own_intervals() -> Generator[None, None, None]:
    """Each test begins its own intervals of progress: what ran just before would make short work show a line."""
    from rotquant.foundation.progress import shown_on

    with shown_on():
        yield


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs. Making its tables takes seconds, so tests start with copies of it.

    All workers of pytest-xdist have the same one, which the first of them makes.
    """
    from reproduction.run.tracking.store import opened

    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fresh"
    root.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(root)
        opened()
    return root / "mlflow.db"

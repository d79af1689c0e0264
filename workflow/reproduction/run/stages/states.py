"""States of full-precision models, shared by the jobs of one workflow in a folder that ends with it.

Every run of a model on a text compares with the same states, which cost as much to compute as the run itself.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rotquant.foundation.files import alone, atomic_path

if TYPE_CHECKING:
    from torch import nn

    from rotquant.metrics.divergence import FloatStates

#: The variable that names the folder; without it nothing is shared.
VARIABLE = "ROTQUANT_STATES"
#: Bytes of all files in the folder; larger states are computed by each job.
MOST = 2**32


def read(about: str) -> "FloatStates | None":
    """Kept states by a digest of all that decides them, on the host; None if there are none."""
    if (path := _path(about)) is None or not path.exists():
        return None
    import torch
    from safetensors import safe_open

    from rotquant.metrics.divergence import FloatStates, head_of

    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        told = file.metadata() or {}
    parameters = {name: found[name] for name in ("weight", "bias") if name in found}
    head = head_of(parameters, float(told["cap"]) if "cap" in told else None)
    return FloatStates(found["windows"], found["states"], head.to(torch.device(told["device"])))


@contextmanager
def computed_once(about: str) -> Iterator[None]:
    """A block that reads states or else computes and keeps them: of jobs that begin together one computes, and the
    others wait for it, but where the folder has no room for what it would keep."""
    path = _path(about)
    with ExitStack() as stack:
        if path is not None and not _without_room(path).exists():
            stack.enter_context(alone(path.with_suffix(".lock")))
            if _without_room(path).exists():
                stack.close()
        yield


def keep(about: str, states: "FloatStates", model: "nn.Module") -> None:
    """Keep states for other jobs, where the folder has room for them."""
    if (path := _path(about)) is None:
        return
    from safetensors.torch import save_file

    from rotquant.models.architectures import lm_head, logit_cap

    head = {name: tensor.detach().cpu().contiguous() for name, tensor in lm_head(model).named_parameters()}
    cap = logit_cap(model)
    told = {"device": str(next(model.parameters()).device)} | ({} if cap is None else {"cap": repr(cap)})
    with suppress(OSError):  # a full disk only costs time
        if sum(one.stat().st_size for one in path.parent.iterdir()) + states.nbytes > MOST:
            _without_room(path).touch()
            return
        with atomic_path(path) as temporary:
            save_file({"windows": states.windows, "states": states.states, **head}, temporary, told)


def _path(about: str) -> Path | None:
    folder = os.environ.get(VARIABLE)
    return Path(folder) / f"{about}.safetensors" if folder else None


def _without_room(path: Path) -> Path:
    """A file that says that there was no room for these states."""
    return path.with_suffix(".large")

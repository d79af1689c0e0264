"""`python -m reproduction.rehearsal`, run by `make rehearsal`: it needs no network, Snakemake, MLflow or lm-eval."""

import argparse
import fnmatch
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from reproduction.rehearsal.kinds import kinds_of
from reproduction.rehearsal.material import TINY, make_folder
from reproduction.rehearsal.running import rehearse, remove, write_page
from reproduction.tables.configuration import find_root
from rotquant.foundation.errors import RotquantError
from rotquant.foundation.files import check_output_file

if TYPE_CHECKING:
    import torch


def main(arguments: list[str] | None = None) -> int:
    """Rehearse, and say how it went; the exit status is 1 where a kind failed, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        return _rehearse(options)
    except RotquantError as error:
        print(f"rotquant: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reproduction.rehearsal",
        description="Run every kind of cell of config/paper.yaml once, with reduced amounts on random weights. Started "
        "again, it continues.",
    )
    parser.add_argument("--shape", default="llama-2-7b", help=f"a paper's model, or {TINY}: for a CPU, in two minutes")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers of a paper's model that stay; 0: all")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU when there is one")
    parser.add_argument("--jobs", type=int, help="kinds at a time; default three on a GPU of 70 GiB or more, else one")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which no further kind begins")
    parser.add_argument("--longest", type=float, default=180.0, help="seconds after which a step is ended")
    parser.add_argument("--kinds", nargs="*", default=["*"], help="patterns with *: only kinds of such names")
    parser.add_argument("--folder", type=Path, help="where it works; default results/rehearsal/SHAPE")
    parser.add_argument("--output", "-o", type=Path, help="the record (JSON); a page (.md) is written next to it")
    parser.add_argument("--keep", action="store_true", help="keep checkpoint and weights once every kind is done")
    return parser


def _rehearse(options: argparse.Namespace) -> int:
    from reproduction.planning.current import current_plan
    from rotquant.tensors.devices import gpu_name, torch_device

    if options.jobs is not None and options.jobs < 1:
        raise RotquantError(f"--jobs is at least 1, not {options.jobs}.")
    root, device = find_root().resolve(), torch_device(options.device)
    layers = None if options.shape == TINY else options.layers or None
    folder = (options.folder or root / "results/rehearsal" / options.shape).resolve()
    record = (options.output or folder / "rehearsal.json").resolve()
    check_output_file(record)
    files = make_folder(root, folder, options.shape, layers, str(device))
    os.chdir(folder)
    plan = current_plan(Path.cwd(), files)
    kinds = [kind for kind in kinds_of(plan) if any(fnmatch.fnmatch(kind.name, one) for one in options.kinds)]
    about = {"shape": options.shape, "layers": layers, "gpu": gpu_name(device)}
    until = time.monotonic() + 60 * options.minutes
    jobs = options.jobs or _jobs(device)
    found = rehearse(plan, kinds, record, about, jobs=jobs, until=until, longest=options.longest, say=_say)
    write_page(record.with_suffix(".md"), found)
    failed = [one for one in found.kinds if one.state == "failed"]
    if not options.keep and all(one.state == "done" for one in found.kinds):
        remove(folder)
    _say(f"{sum(one.state == 'done' for one in found.kinds)} kinds done, {len(failed)} failed; {record}")
    return 1 if failed else 0


def _jobs(device: "torch.device") -> int:
    """How many kinds run at a time: each takes up to 20 GiB of a GPU with four layers of 7B."""
    import torch

    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > 70 * 2**30
    return 3 if large else 1


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

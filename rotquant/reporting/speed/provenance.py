"""Where the numbers of a speed table come from: device and its state before and after, versions, commit, code, time."""

from typing import Any

from rotquant.bench.records import CellRecord, Record, Sitting
from rotquant.reporting.pages.model import Fact
from rotquant.reporting.pages.origins import commit, file_link, versions
from rotquant.reporting.speed.numbers import Source
from rotquant.reporting.words.numbers import listed
from rotquant.study.digests import is_current
from rotquant.study.results import table_path
from rotquant.study.speed.definitions import SpeedTable

_STATE = {
    "clocks.sm": "SM clock {} MHz",
    "clocks.mem": "memory clock {} MHz",
    "power.draw": "{} W",
    "temperature.gpu": "{} °C",
    # Of a CPU.
    "instructions": "{}",
    "threads": "{} threads",
    "load": "load average {}",
    "scheduling": "scheduled as {}",
}


def when_and_where(source: Source) -> str:
    """A sentence: measured here or recorded elsewhere, on which GPU, when, from which commit."""
    used = _sittings(source.record)
    dates = sorted(str(sitting.environment.get("date", "-"))[:10] for sitting, _ in used) or ["-"]
    day = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    commits = listed(_commit(sitting.environment) for sitting, _ in used)
    # A CPU is measured when someone asks for it, so that its record may well be of this machine.
    elsewhere = "were recorded" if all(_is_cpu(sitting) for sitting, _ in used) else "were recorded on another machine"
    verb = f"{elsewhere}, with" if source.recorded else "were measured on this machine, with"
    return f"Upright numbers {verb} an **{source.record.gpu}** ({day}, {commits})."


def gpu_fact(source: Source) -> Fact:
    """On which GPU, and whether it was this machine's."""
    return Fact("GPU", f"{source.record.gpu}{', recorded on another machine' if source.recorded else ''}")


def origin_facts(source: Source) -> tuple[Fact, ...]:
    """The circumstances of each sitting that cells come from, and the code."""
    facts = []
    for sitting, cells in _sittings(source.record):
        seconds = sum(cell.seconds for cell in cells)
        facts += [Fact(f"{len(cells)} cells in {seconds:.0f} s", _place(sitting), ", "), *_states(sitting)]
    return (*facts, Fact("Digest of kernels and benchmarks", _code(source.record)))


def file_links(table: SpeedTable, source: Source) -> list[str]:
    """The record, and the numbers as CSV."""
    return [file_link("Record", source.path), file_link("Table as CSV", table_path(table.id))]


def _sittings(record: Record) -> list[tuple[Sitting, list[CellRecord]]]:
    """The sittings that cells come from, in order, each with its cells."""
    numbers = sorted({cell.sitting for cell in record.cells})
    return [(record.sittings[n], [cell for cell in record.cells if cell.sitting == n]) for n in numbers]


def _code(record: Record) -> str:
    """The digests of what was measured, and whether the code is still the same."""
    older = sum(not is_current(cell.benchmark, cell.code) for cell in record.cells)
    digests = listed(f"`{cell.code}`" for cell in record.cells)
    if not older:
        return f"{digests}, the present code"
    return f"{digests}; {older} of {len(record.cells)} cells were measured by **other code than the present**"


def _place(sitting: Sitting) -> str:
    data = sitting.environment
    driver = sitting.gpu_before.get("driver_version", "-")
    cuda = sitting.gpu_before.get("cuda", "-")
    software = "" if _is_cpu(sitting) else f" driver {driver}, CUDA {cuda};"
    return f"{data.get('date', '-')}, {_commit(data)};{software} {versions(data)}; {data.get('cpu', '-')}"


def _states(sitting: Sitting) -> list[Fact]:
    device = "CPU" if _is_cpu(sitting) else "GPU"
    return [
        Fact(f"{device} {when}", ", ".join(form.format(state[name]) for name, form in _STATE.items() if name in state))
        for when, state in (("before", sitting.gpu_before), ("after", sitting.gpu_after))
        if state
    ]


def _is_cpu(sitting: Sitting) -> bool:
    """Whether a CPU was measured: its state names the instructions that it was given."""
    return "instructions" in sitting.gpu_before


def _commit(data: dict[str, Any]) -> str:
    """The commit that the machine's checkout named, and the one that the digests identified where it was another."""
    named = commit(data)
    if named is None:
        return "commit unknown"
    words = f"commit {named}"
    found = data.get("identified")
    return words if not found else f"{words}; the measured code is that of `{found['git_commit'][:12]}` by its digest"

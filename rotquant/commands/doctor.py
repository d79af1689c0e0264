"""`rotquant doctor`: what this machine and environment have, what is broken or slow, and what to do about each."""

import dataclasses

from rich.table import Column, Table

from rotquant.commands.answers import CommandResult, answers
from rotquant.foundation.progress import task


@answers(
    {
        "checks": "each with name, state (ok, absent, slow or broken), found, and advice, empty where all is well",
        "broken": "how many: the exit status is 1 where there are any",
    }
)
def doctor() -> CommandResult:
    """Check this machine and environment: packages, GPU, kernels, caches, threads; what is slow or broken, and why.

    Exit status 1 where something that is needed is broken. Without a GPU everything works but for its speed.

    Example: `rotquant doctor`
    """
    with task("looking"):
        from rotquant.commands.checks import examine

        found = examine()
    table = Table(Column("what", no_wrap=True), "state", "found", "what to do")
    for check in found:
        table.add_row(check.name, check.state, check.found, check.advice)
    broken = sum(check.state == "broken" for check in found)
    last = f"{broken} broken: see what to do" if broken else "all that is needed works"
    data = {"checks": [dataclasses.asdict(check) for check in found], "broken": broken}
    return CommandResult(data, (table, last), status=int(broken > 0))

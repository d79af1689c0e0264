"""Claims: statements of a paper about a table, decided by the table's numbers, ours and the paper's own.

The rule. A check says in which region an effect lies: a gain above 0, a loss of at most 2 %. Of our numbers the effect
is the mean of paired differences over the same seeds and the same windows or items, with a 95 % interval (`estimates`).
The check *holds* where the whole interval lies in the region, is *contradicted* where all of it lies outside, and is
*undecided* else, with the number of seeds or items that would decide it at this effect and this noise. A claim of
several comparisons holds where all do and is contradicted where one is. Since all must hold, their number calls for no
allowance (Berger 1982, intersection-union tests).

What has no noise, a fact of one network or the paper's printed number, is compared as it is. Something random that has
run with one seed decides nothing. *Not checkable* is what lacks a number or its noise, and what overflowed: whose fault
that is, no claim says. An Inf or NaN that a paper prints is its word for a network that broke down, and ranks worst.
Columns computed by the same runs count once, and no run is compared with itself.

A claim has up to two lines: its direction, and its magnitude in the paper's units. The second is judged where all
columns are the paper's own models; elsewhere ours stands beside the paper's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rotquant.foundation.errors import lookup
from rotquant.reporting.effects import CHECKS, Decision, Finding, Numbers, View
from rotquant.reporting.words.describe import is_stand_in
from rotquant.study.checks import Claim
from rotquant.study.project import Project
from rotquant.study.quantities import Quantity
from rotquant.study.results import RunResult
from rotquant.study.settings import SettingsClaim
from rotquant.study.speed.definitions import SpeedClaim
from rotquant.study.tables import Table
from rotquant.study.values import Values, known_quantities

Shown = Decision | Literal["not judged"]
Results = Mapping[str, RunResult]


@dataclass(frozen=True)
class Verdict:
    """What one set of numbers says about a claim. `missing` names what could not be compared for want of a number."""

    findings: tuple[Finding, ...]
    missing: tuple[str, ...] = ()

    @property
    def decision(self) -> Decision:
        """The rule for several comparisons; what is not checkable among them leaves the rest without a verdict."""
        found = [finding.decision for finding in self.findings]
        if "contradicted" in found:
            return "contradicted"
        if not found or "not checkable" in found:
            return "not checkable"
        return "undecided" if "undecided" in found else "holds"


@dataclass(frozen=True)
class Outcome:
    """A claim, or its magnitude, with the verdict by our numbers and the verdict by the paper's own.

    judged: whether ours decide; a magnitude on other models than the paper's does not.
    """

    claim: Claim | SpeedClaim | SettingsClaim
    ours: Verdict
    papers: Verdict
    magnitude: bool = False
    judged: bool = True

    @property
    def here(self) -> Shown:
        """The decision by our numbers."""
        return self.ours.decision if self.judged else "not judged"


@dataclass(frozen=True)
class Score:
    """How many claims hold, are contradicted, undecided and not checkable by our numbers."""

    holds: int = 0
    contradicted: int = 0
    undecided: int = 0
    unchecked: int = 0

    @property
    def total(self) -> int:
        """How many there are."""
        return self.holds + self.contradicted + self.undecided + self.unchecked


def outcomes(project: Project, table: Table, values: Values, results: Results) -> tuple[Outcome, ...]:
    """Every claim of a table, decided by our numbers and by all that the paper prints, column computed here or not.

    Without a column to compute nothing says what the claims are about, and none is decided.

    Args:
        results: the runs behind the values by key, which know the windows or items; some may be missing.

    Raises:
        ConfigError: a claim about a quantity that is neither measured nor printed.
    """
    measured = project.quantities(table)
    if not measured:
        return ()
    known, main = known_quantities(project, table, values), measured[0]
    computed = {column: project.slot(table, column) for column in project.columns(table)}
    found = []
    for claim in table.claims:
        unknown = f"table {table.id}: a claim is about the unknown quantity"
        quantity = main if claim.quantity is None else lookup(known, claim.quantity, unknown)
        papers_own = not any(is_stand_in(computed[name]) for name in claim.columns or computed if name in computed)
        for check, magnitude in ((claim.check, False), (claim.magnitude, True)):
            if check is not None:
                ours = judge(claim, check, table, values.ours, quantity, results)
                papers = judge(claim, check, table, values.published, quantity)
                found.append(Outcome(claim, ours, papers, magnitude, papers_own or not magnitude))
    return tuple(found)


def score(decided: Sequence[Outcome]) -> Score:
    """Count the outcomes by our numbers; what is not judged is no outcome."""
    found = [outcome.here for outcome in decided]
    return Score(*(found.count(name) for name in ("holds", "contradicted", "undecided", "not checkable")))


def judge(
    claim: Claim,
    check: Mapping[str, Mapping[str, object]],
    table: Table,
    numbers: Numbers,
    quantity: Quantity,
    results: Results | None = None,
) -> Verdict:
    """Decide a check of a claim by the given numbers of one quantity: ours with their `results`, or the paper's."""
    ((kind, arguments),) = check.items()
    columns = [column.name for column in table.columns if claim.columns is None or column.name in claim.columns]
    view = View(quantity, columns, numbers, results)
    found = list(CHECKS[kind](view, **arguments))
    findings = tuple(result for result in found if isinstance(result, Finding))
    return Verdict(findings, tuple(dict.fromkeys(result for result in found if isinstance(result, str))))

"""Claims as data: what a paper says about a table's numbers, and the check that decides it (`reporting.claims`)."""

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from rotquant.foundation.written import AsData, Many, Written

Names = Annotated[Many[str], Field(min_length=1)]
Two = Annotated[Many[str], Field(min_length=2, max_length=2)]
Pairs = Annotated[Many[Two], Field(min_length=1)]
Amount = Annotated[float, Field(ge=0)]


class Loss(Written):
    """What a row loses on another row."""

    row: str
    """The row that loses."""
    over: str
    """The row that it loses on."""


class Bound(Loss):
    """A bound on the difference of two rows, in points or in percent of `over`."""

    percent: float | None = None
    """The bound in percent of `over`."""
    points: float | None = None
    """The bound in the quantity's own units."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if (self.percent is None) == (self.points is None):
            raise ValueError("the bound is either `percent` or `points`")
        return self


class Compared(Written):
    """A row against others."""

    row: str
    """The row that is praised."""
    than: Names
    """The rows that it is compared with."""


class Comparison(Compared):
    """A row against others, by a margin."""

    points: Amount = 0.0
    """By how much, in the quantity's own units."""


class Order(Written):
    """Rows from the best to the worst."""

    rows: Annotated[Many[str], Field(min_length=2)]
    """The rows, the best first."""


class Limit(Written):
    """A bound on one row's numbers."""

    row: str
    """The row."""
    value: float
    """The bound."""


class LossLarger(Loss):
    """What a row loses in pairs of columns."""

    pairs: Pairs
    """Pairs of columns; the loss is larger in the first of each."""


class Gains(Written):
    """The gains of some rows over others."""

    pairs: Pairs
    """Pairs of rows, the better one first."""


class Difference(Written):
    """How far two rows are apart, against two others."""

    of: Two
    """The two that are nearer to each other."""
    than: Two
    """The two that are farther apart."""


class Range(Written):
    """How far the seeds of a row are apart."""

    row: str
    """The row."""
    points: Amount
    """The least range, in the quantity's own units."""


class BestColumn(Written):
    """The column in which a row is best."""

    row: str
    """The row."""
    column: str
    """The column."""


class Check(Written):
    """One check; better, worse and loss follow the quantity: lower is better for perplexity, higher for accuracy."""

    better: Comparison | None = None
    """row is better than each of `than`, by more than `points`."""
    no_worse: Comparison | None = None
    """row is not worse than each of `than`, by more than `points`."""
    order: Order | None = None
    """Each row is better than the next."""
    loss_at_most: Bound | None = None
    """What row loses on `over` is at most this many points, or percent of `over`."""
    close: Bound | None = None
    """row and `over` differ by at most this many points, or percent of `over`, either way."""
    at_most: Limit | None = None
    """The row's number is at most this value."""
    at_least: Limit | None = None
    """The row's number is at least this value."""
    loss_decreasing: Loss | None = None
    """What row loses on `over` gets smaller from each column to the next."""
    loss_larger: LossLarger | None = None
    """What row loses on `over`, in percent, is larger in the first column of each pair than in the second."""
    gains_increasing: Gains | None = None
    """For each pair [better, worse] of rows, the gain of the first over the second, in percent; it grows from pair to
    pair."""
    difference_smaller: Difference | None = None
    """The rows `of` differ by less than the rows `than`, in percent, whichever of the two is better."""
    better_than_best: Compared | None = None
    """row's mean is better than the best seed of each of `than`."""
    spread_smaller: Compared | None = None
    """row's deviation over the seeds is smaller than that of each of `than`."""
    range_at_least: Range | None = None
    """The best and the worst seed of row are at least this many points apart."""
    best_column: BestColumn | None = None
    """The row is best in this column."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("a claim has one check")
        return self


class Experiment(Written):
    """What was measured to find out why a statement is contradicted here."""

    text: str
    """What it varies and what it would show, in one sentence."""
    rows: Many[str] = ()
    """Rows of the same page that are measured for it."""
    target: str | None = None
    """The table, figure or report that shows it, where that is another page."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if (self.target is None) == (not self.rows):
            raise ValueError("an experiment is either some `rows` of the page or another `target`")
        return self


class Statement(Written):
    """What a claim of any kind of table says."""

    text: str
    """The statement, in the paper's words or close to them."""
    section: str
    """Where it stands."""
    quote: str | None = None
    """The paper's own words that it rests on, in short; none where these are no sentence of the paper."""
    note: str | None = None
    """Where the check had to depart from the words, how and why."""
    experiment: Experiment | None = None
    """What tests why it is contradicted; shown where it is."""


Checked = Annotated[dict[str, dict[str, Any]], AsData(Check)]


class Claim(Statement):
    """A statement of the paper about a table, with the checks of its direction and magnitude (`reporting.claims`)."""

    columns: Names | None = None
    """Columns that the claim is about; default all."""
    quantity: str | None = None
    """What is compared, such as perplexity, average or piqa; default the table's main one."""
    check: Checked | None = None
    """Its direction, or what else can be asked of any model: tested."""
    magnitude: Checked | None = None
    """How much it is in the paper's units: shown beside ours, and decided on the paper's models alone."""

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.check is None and self.magnitude is None:
            raise ValueError("a claim has a check, a magnitude or both")
        return self


def checks_of(claim: Claim) -> Iterator[tuple[str, dict[str, Any]]]:
    """The checks of a claim as (kind, arguments): its direction, then its magnitude."""
    for check in (claim.check, claim.magnitude):
        yield from (check or {}).items()


def named_by(claim: Claim) -> Iterator[tuple[str, str]]:
    """The rows and columns that a claim names, as ("row", name) and ("column", name)."""
    yield from (("column", name) for name in claim.columns or ())
    yield from (("row", name) for name in (claim.experiment.rows if claim.experiment else ()))
    for kind, arguments in checks_of(claim):
        for key, value in arguments.items():
            if key in ("row", "over", "column"):
                yield "column" if key == "column" else "row", value
            elif key in ("than", "rows", "of"):
                yield from (("row", name) for name in value)
            elif key == "pairs":
                yield from (("column" if kind == "loss_larger" else "row", name) for pair in value for name in pair)

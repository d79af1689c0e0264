"""Claims as data: a paper's statements about a table's numbers, and the checks that decide them (`claims`).

A claim has one to three checks. Its *mechanism* is a direction and is checked on any model. Its *setting* is only
checked on the paper's own models: magnitudes in its units, bounds from its tables and properties of its weights. A
*fact* cannot fail, or has a bound that no sentence of the paper gives: it is shown and not judged.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import Field, model_validator

from reproduction.reading.written import AsData, Many, Written

S = TypeVar("S", bound="Statement")

Names = Annotated[Many[str], Field(min_length=1)]
Two = Annotated[Many[str], Field(min_length=2, max_length=2)]
Pairs = Annotated[Many[Two], Field(min_length=1)]
Amount = Annotated[float, Field(ge=0)]
About = Literal["mechanism", "setting", "fact"]
"""The subject of a check."""


class Compared(Written):
    """A row against others."""

    row: str
    """The row that the statement is about."""
    than: Names
    """The rows that it is compared with."""


class Better(Written):
    """A row that is better than others, or rows from the best to the worst."""

    row: str | None = None
    """The row that is praised."""
    than: Names | None = None
    """The rows that it is better than."""
    rows: Annotated[Many[str], Field(min_length=2)] | None = None
    """In place of these rows, each of which is better than the next."""
    points: Amount = 0.0
    """By how much, in the quantity's own units."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.rows is None) != (self.row is not None and self.than is not None):
            raise ValueError("a comparison has either `row` and `than`, or `rows`")
        return self


class Bound(Compared):
    """A row against others, by a bound in points or in percent of the other row; without one, whether it loses at
    all."""

    percent: float | None = None
    """The bound in percent of the other row."""
    points: float | None = None
    """The bound in the quantity's own units."""

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if self.percent is not None and self.points is not None:
            raise ValueError("the bound is either `percent` or `points`")
        return self


class Limit(Written):
    """A bound on one row's numbers: a number, or another quantity of the same row, such as normal."""

    row: str
    """The row."""
    at_most: float | str | None = None
    """The largest value."""
    at_least: float | str | None = None
    """The least value."""

    @model_validator(mode="after")
    def _is_of_one_side(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("the bound is either `at_most` or `at_least`")
        return self

    @property
    def ends(self) -> tuple[tuple[float, float | str | None], tuple[float, float | str | None]]:
        """The bound of each side after what stands for none."""
        return (-math.inf, self.at_least), (math.inf, self.at_most)

    @property
    def words(self) -> str:
        """The bound in words."""
        return f"at least {self.at_least}" if self.at_most is None else f"at most {self.at_most}"


class AcrossTables(Written):
    """A row in some columns against others."""

    row: str
    """The row."""
    over: str | None = None
    """The row that it loses on; without one its own numbers are compared."""
    pairs: Pairs
    """Pairs of columns, the worse one first."""
    percent: bool = True
    """Whether a loss is in percent of `over`, not in the quantity's own units."""


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


class OneCheck(Written):
    """A check of any kind of table: one of its fields, with what that asks."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("a claim has one check")
        return self


class Check(OneCheck):
    """One check; better, worse and loss follow the quantity: lower is better for perplexity, higher for accuracy."""

    better: Better | None = None
    """row is better than each of `than`, by more than `points`; or each of `rows` is better than the next."""
    no_worse: Bound | None = None
    """What row loses on each of `than` is at most this many points, or percent; without a bound, it loses nothing."""
    close: Bound | None = None
    """row and each of `than` differ by at most this many points, or percent, either way."""
    value: Limit | None = None
    """The row's number is at most, or at least, this value."""
    across: AcrossTables | None = None
    """What row loses on `over` is larger in the first column of each pair than in the second; or its number is no
    better there."""
    gains_increasing: Gains | None = None
    """For each pair [better, worse] of rows, the gain of the first over the second, in percent; it grows from pair to
    pair."""
    difference_smaller: Difference | None = None
    """The rows `of` differ by less than the rows `than`, in percent, whichever of the two is better."""
    spread_smaller: Compared | None = None
    """row's deviation over the seeds is smaller than that of each of `than`."""


Checked = Annotated[dict[str, dict[str, Any]], AsData(Check)]

#: Checks of which of two rows is better or nearer, which a finer quantity may decide. A check of how large a loss is,
#: in the paper's units or on other models, is not one.
_DIRECTIONS = ("better", "no_worse", "gains_increasing", "difference_smaller", "spread_smaller", "across")
#: Fields with which a check is about a size.
_SIZES = ("points", "percent")


def is_direction(check: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a check only concerns the sign of a difference, without a margin."""
    return all(
        kind in _DIRECTIONS and not arguments.get("over") and not any(arguments.get(name) for name in _SIZES)
        for kind, arguments in check.items()
    )


def bound_of(arguments: Mapping[str, Any]) -> float | str | None:
    """The bound that a check has on a row's value; None without one."""
    return next((arguments[side] for side in ("at_most", "at_least") if side in arguments), None)


class Experiment(Written):
    """A test of what would explain that a claim is not reproduced: the page prints the cause and what the test
    found."""

    cause: str
    """The cause, as a statement: "GPTQ makes up for what the rotation leaves"."""
    target: str | None = None
    """The table, figure or report with the numbers that test it; default the claim's own."""
    columns: Names | None = None
    """Its columns; default all, of the claim's own table those of the claim."""
    quantity: str | None = None
    """What is compared there; default its main one, of the claim's own table that of the claim."""
    check: Checked
    """What is true of these numbers if the cause is right. It names the rows that were measured for it."""


class Regime(Written):
    """What the phenomenon of a claim needs of a model. Where it is not so, the claim cannot be tested on that model."""

    differ: Two | None = None
    """Two rows that are different networks: they do not agree on every window or item."""
    value: Limit | None = None
    """A row's number is at least, or at most, this value, by the claim's quantity."""
    over: str | None = None
    """The row by whose number that of `value` is divided first: ten times the perplexity of FP16."""
    target: str | None = None
    """The table with these rows, whose column of the same model counts; default the claim's own."""
    quantity: str | None = None
    """What `value` is about; default the claim's, in another table its main one."""
    otherwise: Annotated[str, Field(min_length=1, pattern=r"[^.]$")]
    """What is so where it is not, as a statement: "The prefix is one token"."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.differ is None) == (self.value is None):
            raise ValueError("a regime is either `differ` or `value`")
        if self.value is not None and isinstance(bound_of(self.value.model_dump(exclude_unset=True)), str):
            raise ValueError("the value of a regime is a number")
        return self

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows of the condition."""
        rows = (*(self.differ or ()), *(() if self.value is None else (self.value.row,)))
        return rows if self.over is None else (*rows, self.over)


class Statement(Written):
    """Fields of a claim of any kind of table."""

    text: str
    """The statement, in the paper's words or close to them."""
    section: str
    """Where it stands; default the table's."""
    quote: str | None = None
    """The paper's own words that it rests on, in short; none where these are no sentence of the paper."""
    note: str | None = None
    """Where the check had to depart from the words, how and why."""
    headline: bool = False
    """Whether the page's first sentence on what it means is about it; default its first claim."""


class Explained(Statement):
    """A statement that may be not reproduced."""

    because: Annotated[str, Field(min_length=1, pattern=r"[^.]$")] | None = None
    """Why it is not reproduced where that follows from the set-up alone, as a statement: "Here a smaller model is
    trained". Printed where it is not, unless its experiment supports a cause."""


class CheckedClaim(Explained):
    """A statement that is checked: by its `mechanism`, its `setting`, or as a `fact`."""

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if not self.checks and not getattr(self, "shown", None):
            raise ValueError("a claim has a mechanism, a setting or a fact, or rows that show it")
        return self

    @property
    def checks(self) -> Mapping[About, Any]:
        """The claim's checks by subject."""
        found = {about: getattr(self, about) for about in get_args(About)}
        return {about: check for about, check in found.items() if check is not None}


class Claim(CheckedClaim):
    """A statement of the paper about a table, with the checks of what it is about (`claims`)."""

    columns: Names | None = None
    """Columns that the claim is about; default all."""
    quantity: str | None = None
    """What is compared, such as perplexity, average or piqa; default the table's main one."""
    regime: Regime | None = None
    """What its phenomenon needs of a model; a column where it is not so is not compared."""
    mechanism: Checked | None = None
    """Its direction, asked of any model: reproduced, not reproduced, undecided or not checkable."""
    setting: Checked | None = None
    """Statements on the paper's own models: magnitudes, bounds from its tables, properties of their weights. Judged
    only on these models, elsewhere not tested."""
    fact: Checked | None = None
    """What cannot fail, or has a bound that the paper does not give: shown with its numbers, without a verdict."""
    shown: Names | None = None
    """Rows that show it, where no kind of check can ask it: the page refers to them and judges nothing."""
    experiment: Experiment | None = None
    """What tests why it is not reproduced; shown where it is not."""

    @model_validator(mode="after")
    def _mechanisms_are_directions(self) -> Self:
        for kind, arguments in (self.mechanism or {}).items():
            sized = any(arguments.get(name) for name in _SIZES if kind != "across")
            if sized or kind == "close" or (kind == "value" and bound_of(arguments) != 0):
                raise ValueError(f"a mechanism is a direction; the bound of {kind} belongs to `setting` or `fact`")
        if self.experiment is not None and self.mechanism is None and self.setting is None:
            raise ValueError("a fact is not judged, so that no experiment can explain it")
        return self

    @model_validator(mode="after")
    def _is_not_explained_by_itself(self) -> Self:
        if self.experiment is not None and self.experiment.target is None and self.experiment.quantity is None:
            own = {name for check in self.checks.values() for name in names_in(check)}
            if set(named_by_experiment(self.experiment)) <= own | {("column", name) for name in self.columns or ()}:
                raise ValueError("an experiment names a row, a column or a quantity that the claim itself does not")
        return self


def headline(claims: Sequence[S]) -> S | None:
    """The claim of a page's first sentence: the marked one, else the first; None without claims.

    Raises:
        ValueError: several are marked.
    """
    marked = [claim for claim in claims if claim.headline]
    if len(marked) > 1:
        raise ValueError("claims: at most one is the headline")
    return next(iter([*marked, *claims]), None)


def named_by(claim: Claim) -> Iterator[tuple[str, str]]:
    """The rows and columns of its own table that a claim names, as ("row", name) and ("column", name)."""
    yield from (("column", name) for name in claim.columns or ())
    yield from (("row", name) for name in claim.shown or ())
    for check in claim.checks.values():
        yield from names_in(check)
    if claim.regime is not None and claim.regime.target is None:
        yield from (("row", name) for name in claim.regime.rows)
    if claim.experiment is not None and claim.experiment.target is None:
        yield from named_by_experiment(claim.experiment)


def named_by_experiment(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """The rows and columns of its target that an experiment names, in the form of `named_by`."""
    yield from (("column", name) for name in experiment.columns or ())
    yield from names_in(experiment.check)


def names_in(check: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """The rows and columns that a check names, in the form of `named_by`."""
    for kind, arguments in check.items():
        for key, value in arguments.items():
            if key in ("row", "over"):
                yield "row", value
            elif key in ("than", "rows", "of"):
                yield from (("row", name) for name in value)
            elif key == "pairs":
                yield from (("column" if kind == "across" else "row", name) for pair in value for name in pair)


def quantities_in(check: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The quantities that a check uses as bounds."""
    yield from (bound for arguments in check.values() if isinstance(bound := bound_of(arguments), str))

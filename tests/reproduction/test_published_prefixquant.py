"""PrefixQuant's tables as transcribed, and as data: complete, of one format, and consistent with each other.

Tolerances come from the paper's printed digits only; where the paper contradicts itself, or our text of it has lost a
cell, the cell is listed here and not corrected. Tables 5, 8 and 9, of speed, are those of `test_bench_tables.py`.
"""

import itertools
import math

import pytest

from reproduction.sources.runs import Runs
from reproduction.tables.configuration import load_config
from reproduction.tables.project import Project
from tests.helpers.project import REPOSITORY, shipped_project
from tests.helpers.published import Place, Transcription

TASKS = ["winogrande", "hellaswag", "arc_challenge", "arc_easy", "piqa"]
ITEMS = dict(zip(TASKS, (1267, 10042, 1172, 2376, 1838), strict=True))
UNITS = {
    "perplexity": "ppl",
    **dict.fromkeys([*TASKS, "average"], "%"),
    "tokens": "tokens",
    **dict.fromkeys(["content", "granularity"], "text"),
    "minutes": "min",
    "hours": "h",
}
LLAMA2 = ["Llama-2-7B", "Llama-2-13B", "Llama-2-70B"]
LLAMAS = [*LLAMA2, "Llama-3-8B", "Llama-3-70B"]
FURTHER = ["Mistral-7B-v0.3", "Qwen-2-7B", "Llama-3-8B-Instruct", "Llama-3-70B-Instruct"]
PREFIXED = [*LLAMA2, "Llama-3-8B(-Instruct)", "Llama-3-70B(-Instruct)", "Mistral-v0.3-7B", "Qwen-2-7B"]
BITS = ["W8A8KV8", "W4A8KV4", "W4A4KV4"]

# table: (number of cells, columns in printed order, further columns); those of speed have a format of their own.
TABLES = {
    1: (7 * 2, PREFIXED, ["reading"]),
    2: (7 * 2, ["Llama-2-7B", "Llama-3-8B"], ["precision", "setting"]),
    3: (2 * (4 * 7 + 5) - 5, LLAMAS, ["quant_type", "source", "reading"]),
    4: (4 * 5 * 2, LLAMAS, ["activation_quant"]),
    5: (18, [], []),
    6: (7 * 3, BITS, ["activation_quant"]),
    7: (2, ["Weight", "Activation"], ["source"]),
    8: (26, [], []),
    9: (104, [], []),
    10: (2 * 3, ["Find Prefixed Outliers", "Grid-search initialization", "Fine-tuning"], []),
    11: (9, ["Llama-3-8B"], ["varied", "setting"]),
    12: (5 * 2, BITS[1:], ["epochs"]),
    13: (4 * 2, BITS[1:], ["fine_tuning", "quant_type"]),
    14: (2 * (4 + 5) + 1, ["Llama-2-7B", "Mistral-7B-v0.3"], ["method", "tokens"]),
    15: (3 * 2, ["Llama-2-7B", "Mistral-7B-v0.3"], ["prefixed", "reading"]),
    16: (5 * 2 * 7, ["Llama-3-8B", "Llama-3-70B"], ["method", "precision"]),
    17: (3 + 1 + 2 + 2, [*LLAMA2, "Llama-3-8B"], ["activation_quant"]),
    18: ((4 * 14 + 13) * 5 - 87, LLAMAS, ["method", "precision", "source", "reading"]),
    19: (4 * 4 * 6 - 1, FURTHER, []),
}
SPEED = {5, 8, 9}
TRANSCRIBED = [table for table in TABLES if table not in SPEED]

#: Rows that a table does not have for a column.
NOT_RUN = {
    (3, "Llama-3-70B"): {"Atom", "SpinQuant"},
    (14, "Llama-2-7B"): {"PrefixQuant, n = 4"},
    (17, "Llama-2-7B"): set(),
    (17, "Llama-2-13B"): {"CushionCache"},
    (17, "Llama-2-70B"): {"CushionCache"},
    (17, "Llama-3-8B"): {"QFeP"},
    (18, "Llama-3-8B"): {"Atom W4A4KV4"},
    (18, "Llama-3-70B"): {"Atom W4A4KV4"},
}

W, H, C, E, P = TASKS
# Cells that our text of the paper has lost and no other table prints: (table, row, column) -> metrics.
LOST = {
    (3, "DuQuant", "Llama-2-7B"): ["perplexity"],
    (3, "Atom", "Llama-2-70B"): ["average"],
    (3, "PrefixQuant w/o FT", "Llama-2-70B"): ["perplexity"],
    (3, "PrefixQuant", "Llama-2-70B"): ["perplexity"],
    (3, "SpinQuant", "Llama-3-8B"): ["perplexity"],
    (17, "QFeP", "Llama-2-13B"): ["perplexity"],
    (18, "SpinQuant W4A4KV4", "Llama-2-7B"): TASKS,
    (18, "PrefixQuant w/o FT W4A4KV4", "Llama-2-7B"): TASKS,
    (18, "PrefixQuant W4A4KV4", "Llama-2-7B"): TASKS,
    (18, "QoQ W4A8KV8", "Llama-2-7B"): [C],
    (18, "PrefixQuant w/o FT W8A8KV8", "Llama-2-7B"): [H],
    (18, "Baseline", "Llama-2-13B"): [E],
    (18, "Atom W4A4KV4", "Llama-2-13B"): [H, C, E, P],
    (18, "QuaRot W4A4KV4", "Llama-2-13B"): [C],
    (18, "QoQ W4A8KV8", "Llama-2-13B"): [W],
    (18, "PrefixQuant w/o FT W4A8KV8", "Llama-2-13B"): [W],
    (18, "PrefixQuant W4A8KV8", "Llama-2-13B"): TASKS,
    (18, "SmoothQuant W8A8KV8", "Llama-2-13B"): [C, E, P],
    (18, "PrefixQuant w/o FT W4A4KV4", "Llama-2-70B"): [E],
    (18, "PrefixQuant W4A4KV4", "Llama-2-70B"): TASKS,
    (18, "QoQ W4A8KV8", "Llama-2-70B"): TASKS,
    (18, "QuaRot W8A8KV8", "Llama-2-70B"): [W],
    (18, "PrefixQuant w/o FT W8A8KV8", "Llama-2-70B"): [W, H, E, P],
    (18, "QuaRot W4A4KV4", "Llama-3-8B"): TASKS,
    (18, "DuQuant W4A4KV4", "Llama-3-8B"): [H, C, P],
    (18, "PrefixQuant w/o FT W4A8KV8", "Llama-3-8B"): [H, E],
    (18, "PrefixQuant W4A8KV8", "Llama-3-8B"): TASKS,
    (18, "SmoothQuant W8A8KV8", "Llama-3-8B"): [H, E, P],
    (18, "PrefixQuant w/o FT W4A4KV4", "Llama-3-70B"): [W],
    (18, "PrefixQuant W4A4KV4", "Llama-3-70B"): [W, H, E],
    (18, "QoQ W4A8KV8", "Llama-3-70B"): TASKS,
    (18, "QuaRot W4A8KV8", "Llama-3-70B"): [P],
    (18, "PrefixQuant w/o FT W8A8KV8", "Llama-3-70B"): TASKS,
    (19, "W8A8KV8", "Llama-3-70B-Instruct"): ["hellaswag"],
}

# Averages of Tables 3 and 4 that the five tasks of Table 18 do not give: -> (printed, mean of the five).
INCONSISTENT_AVERAGES = {
    (3, "FP16", "Llama-2-70B"): (76.72, 76.708),
    (3, "QuaRot", "Llama-2-7B"): (64.69, 64.48),
    (3, "SpinQuant", "Llama-2-70B"): (75.19, 75.06),
    (4, "PrefixQuant", "Llama-2-7B"): (68.90, 68.086),
}

# Accuracies that are no share of a task's items: (row, column, task) -> printed.
NO_SHARE = {
    ("QoQ W4A8KV8", "Llama-3-8B", C): "50.87",
    ("QuaRot W4A8KV8", "Llama-3-8B", W): "72.74",
    ("PrefixQuant w/o FT W4A4KV4", "Llama-2-70B", C): "52.5",
    ("PrefixQuant w/o FT W4A8KV8", "Llama-3-70B", W): "79.23",
    # The whole row is printed with one decimal.
    ("SpinQuant W4A4KV4", "Llama-3-70B", C): "56",
    ("SpinQuant W4A4KV4", "Llama-3-70B", E): "77.3",
    ("SpinQuant W4A4KV4", "Llama-3-70B", P): "80.8",
}

PRINTED = Transcription("prefixquant", TABLES, UNITS)
read, cells = PRINTED.read, PRINTED.cells


def test_there_is_one_file_per_table() -> None:
    PRINTED.check_files()
    assert all(len(read(table)) == TABLES[table][0] for table in SPEED)


@pytest.mark.parametrize("table", TRANSCRIBED)
def test_a_table_has_the_documented_columns_and_number_of_cells_each_once(table: int) -> None:
    PRINTED.check_format(table)


@pytest.mark.parametrize("table", [table for table in TRANSCRIBED if table not in (1, 7, 10)])
def test_a_table_covers_every_row_for_every_column_and_metric_but_the_lost_cells(table: int) -> None:
    printed = cells(table)
    rows, metrics = {row for row, _, _ in printed}, {metric for _, _, metric in printed}
    missing: dict[tuple[int, str, str], set[str]] = {}
    for row, column in itertools.product(rows, TABLES[table][1]):
        lost = {metric for metric in metrics if (row, column, metric) not in printed}
        if lost and row not in NOT_RUN.get((table, column), set()):
            missing[table, row, column] = lost
    assert missing == {place: set(names) for place, names in LOST.items() if place[0] == table}


@pytest.mark.parametrize("table", TRANSCRIBED)
def test_values_are_numbers_as_printed(table: int) -> None:
    for (row, column, metric), value in cells(table).items():
        if UNITS[metric] == "text":
            continue
        if value == "-":
            assert (table, row, column) in {(3, "Atom", "Llama-3-8B"), (14, "PrefixQuant w/o FT, n = 4", "Llama-2-7B")}
            continue
        assert math.isfinite(float(value)), (row, column, value)
        assert float(value) > 0
        assert len(value.partition(".")[2]) <= 2
        assert UNITS[metric] != "%" or 25 < float(value) < 100


@pytest.mark.parametrize("table", [3, 4])
def test_a_printed_average_is_the_mean_of_the_tasks_of_table_18(table: int) -> None:
    # Five tasks rounded to 0.01 move their mean by up to 0.005, and the average is rounded by up to 0.005.
    bits = {3: "W4A4KV4", 4: "W4A8KV8"}[table]
    tasks, averages, compared = cells(18), cells(table), 0
    for (row, column, metric), average in averages.items():
        name = "Baseline" if row == "FP16" else f"{row} {bits}"
        numbers = [tasks.get((name, column, task)) for task in TASKS]
        if metric != "average" or None in numbers:
            continue
        compared += 1
        mean = sum(float(number or "nan") for number in numbers) / len(TASKS)
        if (table, row, column) in INCONSISTENT_AVERAGES:
            assert (float(average), mean) == pytest.approx(INCONSISTENT_AVERAGES[table, row, column], abs=6e-4)
            assert abs(float(average) - mean) > 0.01
        else:
            assert abs(float(average) - mean) <= 0.01 + 1e-9, (row, column, average, mean)
    assert compared == {3: 19, 4: 11}[table]


def test_a_printed_average_of_table_16_is_the_mean_of_its_tasks() -> None:
    PRINTED.check_averages(16, TASKS, 0.01, {})


@pytest.mark.parametrize("table", [16, 18, 19])
def test_an_accuracy_is_a_share_of_the_items_of_its_task(table: int) -> None:
    """To two decimals, of which trailing zeros are not printed: a digit that is read wrong is rarely one."""
    for (row, column, task), value in cells(table).items():
        if task in TASKS:
            right = round(float(value) * ITEMS[task] / 100)
            shares = {f"{100 * count / ITEMS[task]:.2f}" for count in (right - 1, right, right + 1)}
            known = table == 18 and NO_SHARE.get((row, column, task)) == value
            assert (f"{float(value):.2f}" in shares) != known, (row, column, task, value)


# One experiment printed in two tables, as (table, row); compared over all columns and metrics that both print.
REPEATED_ROWS = [
    ((2, "FP16"), (3, "FP16")),
    ((3, "FP16"), (16, "Baseline")),
    ((16, "Baseline"), (18, "Baseline")),
    ((14, "PrefixQuant w/o FT, n = 3"), (15, "default")),
    ((14, "PrefixQuant w/o FT, n = 4"), (15, "default")),
    ((11, "Dataset Pile"), (11, "Sequence length 512 x 1024")),
    ((11, "Dataset Pile"), (11, "Total tokens 512 x 1024")),
    ((6, "+ prefixed outliers"), (12, "0 epochs (w/o FT)")),
    ((6, "+ prefixed outliers"), (13, "w/o FT, tensor-wise static")),
    ((6, "+ block-wise fine-tuning"), (13, "FT, tensor-wise static")),
    ((3, "PrefixQuant w/o FT"), (14, "PrefixQuant w/o FT, n = 3")),
    ((3, "PrefixQuant"), (14, "PrefixQuant, n = 3")),
]


@pytest.mark.parametrize(("first", "second"), REPEATED_ROWS)
def test_an_experiment_printed_in_two_tables_has_one_value(first: Place, second: Place) -> None:
    # Three tokens are Llama-2-7B's own number and four Mistral-7B's; other columns of these rows are other experiments.
    own = {"n = 3": "Llama-2-7B", "n = 4": "Mistral-7B-v0.3"}
    columns = [column for name, column in own.items() if name in first[1] + second[1]]
    one, other = PRINTED.row(*first), PRINTED.row(*second)
    shared = [place for place in one.keys() & other.keys() if place[0] in (columns or [place[0]])]
    assert shared
    assert {place: one[place] for place in shared} == {place: other[place] for place in shared}


# One experiment of Llama-3-8B printed in several tables with different numbers: (table, row, column) -> printed.
DISAGREEING = [
    {
        (3, "PrefixQuant", "Llama-3-8B"): "7.43",
        (6, "+ block-wise fine-tuning", "W4A4KV4"): "7.41",
        (11, "Dataset Pile", "Llama-3-8B"): "7.42",
        (12, "20 epochs", "W4A4KV4"): "7.42",
    },
    {
        (4, "PrefixQuant", "Llama-3-8B"): "6.62",
        (6, "+ block-wise fine-tuning", "W4A8KV4"): "6.63",
        (12, "10 epochs", "W4A8KV4"): "6.63",
    },
    {(3, "QuaRot", "Llama-3-8B"): "8.41", (6, "QuaRot", "W4A4KV4"): "8.33"},
    {(4, "QuaRot", "Llama-3-8B"): "6.80", (6, "QuaRot", "W4A8KV4"): "6.75"},
]


@pytest.mark.parametrize("experiment", DISAGREEING)
def test_where_the_paper_prints_several_numbers_of_an_experiment_they_are_kept(
    experiment: dict[tuple[int, str, str], str],
) -> None:
    assert {(n, row, column): cells(n)[row, column, "perplexity"] for n, row, column in experiment} == experiment
    assert len({*experiment.values()}) > 1


def test_a_cell_read_from_another_table_has_that_tables_value() -> None:
    found = [(cell["row"], cell["column"], cell["value"]) for n in (3, 18) for cell in read(n) if cell["source"] != "-"]
    assert found == [
        ("PrefixQuant w/o FT", "Llama-3-8B", cells(6)["+ prefixed outliers", "W4A4KV4", "perplexity"]),
        ("Baseline", "Llama-3-8B", cells(16)["Baseline", "Llama-3-8B", "arc_easy"]),
    ]


@pytest.mark.parametrize("table", [3, 18])
def test_a_damaged_number_keeps_the_digits_that_are_left_in_their_places(table: int) -> None:
    """A slash stands for 7, 0 for 6, and 1 for 3; dots may be lost, and dashes are a line's of the table."""
    for cell in read(table):
        if cell["reading"] != "-":
            left = cell["reading"].strip("-_").replace(" ", "").replace(".", "")
            digits = cell["value"].replace(".", "")
            assert len(left) == len(digits), cell
            assert all(
                a == b or (a, b) in {("/", "7"), ("0", "6"), ("1", "3")} for a, b in zip(left, digits, strict=True)
            ), cell


def test_numbers_of_the_papers_text_follow_from_its_tables() -> None:
    def difference(table: int, worse: str, better: str, column: str, metric: str = "perplexity") -> float:
        return round(float(cells(table)[worse, column, metric]) - float(cells(table)[better, column, metric]), 2)

    eight = "Llama-3-8B"
    assert difference(3, "QuaRot", "PrefixQuant", eight) == 0.98  # abstract
    assert difference(3, "QuaRot", "PrefixQuant", eight, "average") == -5.93  # the abstract says 5.98
    assert difference(3, "QuaRot", "PrefixQuant w/o FT", eight) == 0.48  # Sec. 6.2
    assert difference(3, "QuaRot", "PrefixQuant w/o FT", eight, "average") == -3.22
    assert difference(4, "QoQ", "PrefixQuant", eight) == 0.27
    assert difference(4, "QoQ", "PrefixQuant", eight, "average") == -1.11
    two = [f"{method} W2A16g128" for method in ("EfficientQAT", "PrefixQuant")]
    assert difference(16, two[0], two[1], eight, "average") == -5.05
    assert difference(16, two[0], two[1], "Llama-3-70B", "average") == -4.73
    assert difference(17, "QFeP", "PrefixQuant", "Llama-2-70B") == 2.62  # Sec. H.1
    assert difference(17, "CushionCache", "PrefixQuant", eight) == 1.20


#: Tables that stand in accuracy.yaml and ablations.yaml.
AS_DATA = [2, 3, 4, 6, 11, 12, 13, 14, 15, 16, 17, 18, 19]
OTHERWISE = {
    "PrefixQuant has a lower perplexity than Atom and DuQuant.": "contradicted",
    "Fine-tuning enhances PrefixQuant, by accuracy.": "contradicted",
    "Even without fine-tuning PrefixQuant outperforms QoQ and QuaRot, by perplexity.": "contradicted",
    "Even without fine-tuning PrefixQuant outperforms QoQ and QuaRot, by accuracy.": "contradicted",
    "On Llama-2-7B three tokens are the best number, without fine-tuning.": "contradicted",
    "On Mistral-7B four tokens are the best number, without fine-tuning.": "contradicted",
    "In W8A8KV8 PrefixQuant is nearly lossless without fine-tuning.": "not checkable",
    "SmoothQuant is near lossless in W8A8KV8.": "not checkable",
    "QuaRot is near lossless in W8A8KV8.": "not checkable",
    "PrefixQuant is near lossless in W8A8KV8, with static scales and without fine-tuning.": "not checkable",
}
"""Claims that the paper's own numbers do not bear out, or that it prints no numbers for; the note of each says why."""


#: Rows of ours beside the paper's: what a prefix, static scales and the rounding of weights contribute each (Table 3),
#: and QoQ as its own paper prefers it (Table 4).
OWN_ROWS = {"QoQ, groups of 128"}


@pytest.mark.parametrize("table", AS_DATA)
def test_rows_and_columns_are_those_of_the_paper(table: int, project: Project) -> None:
    """Beyond them stand the baseline of tables that print none, Table 14's rows with all tokens, and `OWN_ROWS`."""
    kinds = {"perplexity" if cell["metric"] == "perplexity" else "zero_shot" for cell in read(table)}
    PRINTED.check_data(project, table, {"FP16", "PrefixQuant w/o FT, found", "PrefixQuant, found"} | OWN_ROWS, kinds)


@pytest.mark.parametrize("table", AS_DATA)
def test_claims_hold_by_the_papers_own_numbers(table: int, project: Project) -> None:
    PRINTED.check_claims(project, table, OTHERWISE)


def test_claims_that_the_paper_does_not_bear_out_are_there(project: Project) -> None:
    texts = [claim.text for table in AS_DATA for claim in project.table(f"prefixquant_table{table}").claims]
    assert OTHERWISE.keys() <= {*texts}


def test_every_claim_names_the_papers_words() -> None:
    for name in ("accuracy", "ablations"):
        path = REPOSITORY / "workflow" / "papers" / "prefixquant" / f"{name}.yaml"
        assert all(claim.quote for table in Runs().load(path, REPOSITORY) for claim in table.claims)


@pytest.mark.parametrize("path", ["config/config.yaml", "config/paper.yaml"])
def test_accuracy_is_the_mean_of_the_papers_five_tasks_where_they_are_at_hand(path: str) -> None:
    project = shipped_project(path)
    for table in AS_DATA:
        measured = [quantity.name for quantity in project.quantities(project.table(f"prefixquant_table{table}"))]
        accuracy = table in (3, 4, 16, 18, 19)
        assert set(TASKS) & set(measured) == (set(TASKS) if path.endswith("paper.yaml") and accuracy else set())
        assert ("average" in measured) == accuracy


def first_runs(project: Project, table: int, row: str) -> dict[tuple[str, str], str]:
    """Key of the first seed's run by column and metric."""
    cells = [cell for cell in project.cells(f"prefixquant_table{table}") if cell.row == row]
    return {(cell.column, cell.metric.kind): cell.runs[0].key for cell in cells}


#: One experiment in two tables: (table, row, column) twice.
SHARED = [
    ((3, "PrefixQuant w/o FT", "Llama-3-8B"), (6, "+ prefixed outliers", "W4A4KV4")),
    ((3, "PrefixQuant w/o FT", "Llama-3-8B"), (12, "0 epochs (w/o FT)", "W4A4KV4")),
    ((3, "PrefixQuant", "Llama-3-8B"), (6, "+ block-wise fine-tuning", "W4A4KV4")),
    ((3, "PrefixQuant", "Llama-3-8B"), (11, "Dataset Pile", "Llama-3-8B")),
    ((3, "PrefixQuant", "Llama-3-8B"), (12, "20 epochs", "W4A4KV4")),
    ((3, "PrefixQuant", "Llama-3-8B"), (13, "FT, tensor-wise static", "W4A4KV4")),
    ((3, "PrefixQuant", "Llama-2-7B"), (14, "PrefixQuant, found", "Llama-2-7B")),
    ((3, "PrefixQuant w/o FT", "Llama-2-7B"), (15, "default", "Llama-2-7B")),
    ((4, "PrefixQuant", "Llama-3-8B"), (6, "+ block-wise fine-tuning", "W4A8KV4")),
    ((4, "PrefixQuant", "Llama-3-8B"), (12, "10 epochs", "W4A8KV4")),
    ((4, "PrefixQuant", "Llama-3-8B"), (13, "FT, tensor-wise static", "W4A8KV4")),
    ((3, "QuaRot", "Llama-3-8B"), (6, "QuaRot", "W4A4KV4")),
    ((4, "QuaRot", "Llama-3-8B"), (6, "QuaRot", "W4A8KV4")),
    ((19, "W4A4KV4", "Mistral-7B-v0.3"), (14, "PrefixQuant, found", "Mistral-7B-v0.3")),
]


@pytest.mark.parametrize(("first", "second"), SHARED)
def test_an_experiment_in_two_tables_is_run_once(
    first: tuple[int, str, str], second: tuple[int, str, str], project: Project
) -> None:
    one, other = (first_runs(project, n, row)[column, "perplexity"] for n, row, column in (first, second))
    assert one == other


@pytest.mark.parametrize("table", [3, 4])
def test_the_accuracies_of_tables_3_and_4_are_those_of_table_18(table: int, project: Project) -> None:
    bits = {3: "W4A4KV4", 4: "W4A8KV8"}[table]
    for row in project.table(f"prefixquant_table{table}").rows:
        if row.name in OWN_ROWS:
            continue
        name = "Baseline" if row.name == "FP16" else f"{row.name} {bits}"
        for column in LLAMAS:
            place = (column, "zero_shot")
            assert first_runs(project, table, row.name)[place] == first_runs(project, 18, name)[place]


def test_each_computed_row_is_an_experiment_of_its_own(project: Project) -> None:
    """But for those that a table prints twice."""
    same = {11: {"Sequence length 512 x 1024", "Total tokens 512 x 1024"}}
    for table in AS_DATA:
        data = project.table(f"prefixquant_table{table}")
        rows = [row.name for row in data.rows if row.name not in same.get(table, set())]
        keys = [tuple(first_runs(project, table, row).items()) for row in rows]
        assert len(set(keys)) == len(keys)


def test_spinquants_row_is_that_of_its_own_paper(project: Project) -> None:
    """With its rotations, learned on the same text; tasks differ."""
    own = {cell.column: cell for cell in project.cells("spinquant_table1") if cell.row == "SpinQuant-hard 4-4-4"}
    compared = [cell for cell in project.cells("prefixquant_table3") if cell.row == "SpinQuant"]
    keys = {cell.column: cell.runs[0].weights_key for cell in compared}
    assert all(own[column].runs[0].weights_key == key for column, key in keys.items() if column in own)


def test_the_number_of_fine_tunings_is_known(project: Project) -> None:
    """Fine-tuning costs most: a change of a table that adds to it should be one that was meant.

    W4A4KV4 and W4A8KV4 on five checkpoints, ablations of one or two, and weight-only rows on two.
    """
    names = [f"prefixquant_table{table}" for table in AS_DATA]
    runs = {run.key: run for name in names for cell in project.cells(name) for run in cell.runs}
    tuned = {run.weights_key for run in runs.values() if "block_ap" in run.recipe.methods}
    prefixed = 2 * 5 + 1 + 6 + 6 + 2 + 5 * 2 + 2 * 2
    assert len(tuned) == len(project.config.seeds) * (prefixed + 2 * 2)


def test_fine_tuning_texts_of_the_default_configuration_keep_the_papers_proportions() -> None:
    slot = load_config(root=REPOSITORY).slot("Llama-3-8B")
    samples, lengths = ({int(paper): here for paper, here in slot.texts[field].items()} for field in slot.texts)
    assert {paper / here for paper, here in lengths.items()} == {1024 / lengths[1024]}
    assert {paper / samples[paper] for paper in (256, 512, 1024)} == {512 / samples[512]}
    assert slot.methods["block_ap"]["text"] == {"samples": samples[512], "sequence_length": lengths[1024]}

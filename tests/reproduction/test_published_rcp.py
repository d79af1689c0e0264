"""RCP's tables as transcribed, and as data: complete, of one format, and consistent with each other.

Tolerances come from the paper's printed digits only; where the paper contradicts itself the cell is listed here and not
corrected. Tables 5, 7 and 17 to 20, of speed, are those of `test_speed.py`.
"""

import itertools
import math
from typing import Any

import pytest

from reproduction.claims.claims import outcomes
from reproduction.frame.values import Values, printed
from reproduction.sources.runs import Runs
from reproduction.tables.project import Project
from tests.helpers.project import REPOSITORY, shipped_project
from tests.helpers.published import Place, Transcription

TASKS = ["piqa", "hellaswag", "winogrande", "arc_challenge"]
LONG = ["hotpotqa", "multifieldqa_en", "triviaqa", "2wikimqa", "musique", "samsum", "passage_count"]
UNITS = {"perplexity": "ppl", **dict.fromkeys([*TASKS, *LONG, "mmlu", "humaneval", "gsm8k", "average"], "%")}
FIRST = ["Llama-1-7B", "Llama-2-7B", "Llama-2-13B"]
SECOND = ["Llama-3.2-1B", "Llama-3.2-3B", "Llama-3-8B"]
MODELS = [*FIRST, "Llama-3-8B", "Llama-3.2-1B", "Llama-3.2-3B"]
DOMAINS = ["WizardCoder-7B", "MetaMath-7B"]
LONG_MODELS = ["Llama-2-7B-chat-4k", "Llama-2-7B-Instruct-32k"]
BITS = ["2-4-16", "2-4-4", "3-4-16", "3-4-4"]
METHODS = ["BitDistiller", "BitDistiller w/ Rotation", "RCP"]
KEYS = ["method", "bits", "rotation", "ldp"]
ROWS = ["BF16", *(f"{method} {bits}" for bits in BITS for method in METHODS)]

# table: (number of cells, columns in printed order, further columns)
TABLES = {
    1: (4 * 3, ["Llama-2-7B", *DOMAINS], ["rotation"]),
    2: (13 * 6 * 3, MODELS, KEYS),
    3: (13 * 2, DOMAINS, KEYS),
    4: (3 * 2, LONG_MODELS, []),
    9: (4, ["Llama-2-7B"], ["bits", "rotation", "lwc", "ldp"]),
    10: (6, ["Llama-2-7B"], []),
    12: (2, ["Llama-2-7B"], ["bits", "factorized", "batch", "epoch"]),
    13: (13 * 3 * 5, FIRST, KEYS),
    14: (13 * 3 * 5, SECOND, KEYS),
    15: (3 * 8, LONG_MODELS[:1], ["printed"]),
    16: (3 * 8, LONG_MODELS[1:], ["printed"]),
}
#: Tables of speed, memory, cost and settings, which have formats and tests of their own.
OTHERS = {5, 6, 7, 8, 11, 17, 18, 19, 20}

# Averages that the tasks of Tables 13 and 14 do not give: -> (printed, mean of the four).
INCONSISTENT_AVERAGES = {
    (13, "BitDistiller 2-4-16", "Llama-1-7B"): (43.56, 42.555),
    (13, "BitDistiller 3-4-4", "Llama-2-13B"): (58.07, 57.28),
    (13, "RCP 3-4-16", "Llama-2-7B"): (59.74, 59.7625),
    (14, "BitDistiller 3-4-4", "Llama-3-8B"): (56.35, 56.4025),
    (14, "RCP 2-4-16", "Llama-3.2-1B"): (41.08, 41.35),
    (14, "RCP 2-4-16", "Llama-3.2-3B"): (45.71, 45.7275),
}

# Averages printed otherwise in Table 2 than in Tables 13 and 14: -> (Table 2, Table 13 or 14). Llama-2-13B aside.
DISAGREEING = {
    ("BitDistiller 2-4-16", "Llama-1-7B"): ("42.56", "43.56"),
    ("RCP 2-4-16", "Llama-1-7B"): ("52.29", "52.46"),
    ("BitDistiller w/ Rotation 3-4-4", "Llama-2-7B"): ("58.53", "58.83"),
    ("RCP 2-4-16", "Llama-3.2-1B"): ("41.35", "41.08"),
    ("RCP 3-4-4", "Llama-3.2-1B"): ("47.71", "47.41"),
}

PRINTED = Transcription("rcp", TABLES, UNITS)
read, cells = PRINTED.read, PRINTED.cells


def test_there_is_one_file_per_table() -> None:
    names = {path.name for path in PRINTED.folder.glob("table*.csv")}
    assert {f"table{n}.csv" for n in TABLES} <= names <= {f"table{n}.csv" for n in {*TABLES, *OTHERS}}


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_documented_columns_and_number_of_cells_each_once(table: int) -> None:
    PRINTED.check_format(table)


@pytest.mark.parametrize("table", [table for table in TABLES if table != 1])
def test_a_table_covers_every_row_for_every_column_and_metric(table: int) -> None:
    printed = cells(table)
    rows, columns, metrics = ({place[i] for place in printed} for i in range(3))
    if table == 3:
        assert {place[1:] for place in printed} == {("WizardCoder-7B", "humaneval"), ("MetaMath-7B", "gsm8k")}
        columns, metrics = {"WizardCoder-7B"}, {"humaneval"}
    assert {*itertools.product(rows, columns, metrics)} <= printed.keys()


@pytest.mark.parametrize("table", [2, 3, 13, 14])
def test_rows_are_three_methods_at_four_bits(table: int) -> None:
    assert list(dict.fromkeys(cell["row"] for cell in read(table))) == ROWS
    marks = {
        "BF16": ("-", "-"),
        "BitDistiller": ("no", "no"),
        "BitDistiller w/ Rotation": ("yes", "no"),
        "RCP": ("yes",) * 2,
    }
    for cell in read(table):
        name = cell["method"] if cell["method"] == "BF16" else f"{cell['method']} {cell['bits']}"
        assert (name, (cell["rotation"], cell["ldp"])) == (cell["row"], marks[cell["method"]])


@pytest.mark.parametrize("table", TABLES)
def test_values_are_numbers_as_printed(table: int) -> None:
    for place, value in cells(table).items():
        if value == "Inf":
            assert place[2] == "perplexity"
            assert place[0].startswith("BitDistiller ")
        elif UNITS[place[2]] == "%":
            assert 0 <= float(value) < 100
        else:
            assert math.isfinite(float(value))
            assert float(value) > 4


def test_the_check_marks_that_our_text_has_lost_are_those_of_the_papers_words() -> None:
    """17.40 is the baseline (Sec. 5.2), rotation recovers language modelling (Sec. 3), and each part is a gain."""
    for row, bits in itertools.product(MODELS, BITS):
        without, rotated, whole = (float(cells(2)[f"{method} {bits}", row, "perplexity"]) for method in METHODS)
        assert without > rotated > whole, (row, bits)
    assert cells(2)["BitDistiller 2-4-4", "Llama-2-7B", "perplexity"] == "17.40"
    steps = [(cell["rotation"], cell["lwc"], cell["ldp"]) for cell in read(9)]
    assert steps == [("no", "no", "no"), ("yes", "no", "no"), ("yes", "yes", "no"), ("yes", "yes", "yes")]
    assert [cell["value"] for cell in read(9)] == sorted((cell["value"] for cell in read(9)), key=float, reverse=True)


@pytest.mark.parametrize("table", [13, 14])
def test_a_printed_average_is_the_mean_of_the_four_tasks(table: int) -> None:
    # Four tasks rounded to 0.01 move their mean by up to 0.005, and the average is rounded by up to 0.005.
    PRINTED.check_averages(table, TASKS, 0.01, INCONSISTENT_AVERAGES)


@pytest.mark.parametrize("table", [15, 16])
def test_a_printed_average_is_the_mean_of_the_seven_tasks(table: int) -> None:
    """The text speaks of eight."""
    PRINTED.check_averages(table, LONG, 0.01, {})


def averages(table: int) -> dict[tuple[str, str], str]:
    """Printed averages by (row, column)."""
    return {(row, column): value for (row, column, metric), value in cells(table).items() if metric == "average"}


def test_averages_of_table_2_are_those_of_tables_13_and_14() -> None:
    both = averages(13) | averages(14)
    for place, value in averages(2).items():
        if place[1] != "Llama-2-13B":
            assert (value, both[place]) == DISAGREEING.get(place, (value,) * 2) or float(value) == float(both[place])


def test_averages_of_llama_2_13b_in_table_2_have_mmlu_as_a_fifth_task() -> None:
    for (row, column), four in averages(13).items():
        five, mmlu = (float(cells(2)[row, column, metric]) for metric in ("average", "mmlu"))
        with_mmlu = (4 * float(four) + mmlu) / 5
        # 0.8 of the rounding of the four's average, 0.2 of MMLU's, and that of the five's.
        assert (abs(with_mmlu - five) <= 0.01 + 1e-9) == (column == "Llama-2-13B"), (row, column, with_mmlu, five)


def test_a_cell_of_llama_1_is_printed_twice() -> None:
    """RCP 2-4-16 and 2-4-4 in Table 2, while their tasks differ in Table 13."""
    for metric in ("mmlu", "average", "perplexity"):
        assert len({cells(2)[f"RCP {bits}", "Llama-1-7B", metric] for bits in BITS[:2]}) == 1
    assert len({averages(13)[f"RCP {bits}", "Llama-1-7B"] for bits in BITS[:2]}) == 2


# One experiment printed in two tables, as (table, row); compared over all columns and metrics that both print.
REPEATED_ROWS = [
    *(((1, method), (2, f"{method} 2-4-4")) for method in METHODS),
    *(((1, method), (3, f"{method} 2-4-4")) for method in METHODS),
    *(((4, row), (table, row)) for row in ("BF16", "BitDistiller", "RCP") for table in (15, 16)),
    ((2, "BitDistiller 2-4-4"), (9, "BitDistiller")),
    ((2, "BitDistiller w/ Rotation 2-4-4"), (9, "+ Rotation")),
    ((2, "RCP 2-4-4"), (9, "+ LDP")),
    ((9, "+ LDP"), (10, "RCP")),
]


@pytest.mark.parametrize(("first", "second"), REPEATED_ROWS)
def test_an_experiment_printed_in_two_tables_has_one_value(first: Place, second: Place) -> None:
    PRINTED.check_repeated(first, second, lambda one, other: float(one) == float(other))


def test_numbers_of_the_papers_text_follow_from_its_tables() -> None:
    def printed(table: int, row: str, column: str, metric: str = "perplexity") -> float:
        return float(cells(table)[row, column, metric])

    seven, thirteen = "Llama-2-7B", "Llama-2-13B"
    assert round(printed(2, "RCP 2-4-4", seven) - printed(2, "BF16", seven), 2) == 2.84  # abstract
    assert [printed(2, f"{method} 2-4-4", thirteen) for method in METHODS[1:]] == [11.45, 7.95]  # Sec. 5.2
    assert [printed(2, f"{method} 2-4-4", seven) for method in (METHODS[0], "RCP")] == [17.40, 8.31]
    coding = [printed(3, f"{method} 2-4-4", "WizardCoder-7B", "humaneval") for method in METHODS[1:]]
    assert coding == [6.09, 23.20]
    assert round(coding[1] / coding[0], 1) == 3.8  # "up to a threefold improvement"
    assert [averages(4)["RCP", column] for column in LONG_MODELS] == ["19.32", "12.29"]
    assert [averages(4)["BitDistiller", column] for column in LONG_MODELS] == ["4.37", "5.16"]
    assert [cell["value"] for cell in read(12)] == ["7.6", "12.5"]  # Sec. A.5


#: Rows of ours beside those of the paper, by table.
EXACT = {"LWC, exact zero point 2-4-16", "LWC, exact zero point 2-4-4"}
OURS = {
    1: {"BF16", "RCP before training"},
    2: EXACT,
    3: EXACT,
    9: {"BF16", "+ LDP, uniform levels", "LWC, exact zero point", "LDP, nothing learned"},
    10: {"BF16"},
    12: {"BF16"},
    13: EXACT,
    14: EXACT,
}
OTHERWISE: dict[str, str] = {
    **dict.fromkeys(
        (
            "Levels between learned partitions are better than levels at equal distances.",
            "Learned partitions improve 2-bit weights further (perplexity).",
            "Learned partitions improve 2-bit weights with a 4-bit KV cache further (perplexity).",
            "Learned partitions make 2-bit weights more accurate on MMLU.",
            "Learned partitions make 2-bit weights more accurate on zero-shot tasks.",
            "Learned partitions make 2-bit weights with a 4-bit KV cache more accurate on zero-shot tasks.",
            "Rotation gives a larger gain than learned partitions.",
            "The grid search's ranges are good already, so that learning them gains less than learned partitions do.",
            "Learned partitions reduce the perplexity further.",
            "With 2-bit weights learned partitions improve coding.",
            "With 2-bit weights learned partitions improve mathematics.",
            "With 2-bit weights and a 4-bit KV cache learned partitions improve coding.",
            "With 2-bit weights and a 4-bit KV cache learned partitions improve mathematics.",
            "Learned partitions make 2-bit weights with a 4-bit KV cache more accurate on MMLU.",
        ),
        "not checkable",
    )
}
"""Claims that the paper prints no numbers for: it has no row of clips alone with the partitions' exact zero point."""


@pytest.mark.parametrize("table", TABLES)
def test_rows_and_columns_are_those_of_the_paper(table: int, project: Project) -> None:
    kinds = {"perplexity" if cell["metric"] == "perplexity" else "zero_shot" for cell in read(table)}
    further = {"perplexity"} if table == 3 else set()  # with which KL divergence comes
    PRINTED.check_data(project, table, OURS.get(table, set()), kinds | further)


@pytest.mark.parametrize("table", TABLES)
def test_claims_hold_by_the_papers_own_numbers(table: int, project: Project) -> None:
    PRINTED.check_claims(project, table, OTHERWISE if table in (2, 3, 9) else {})


def test_claims_of_figure_1_hold_by_the_numbers_of_table_2(project: Project) -> None:
    table = project.table("rcp_figure1")
    assert project.published(table).keys() <= cells(2).keys()
    for outcome in outcomes(project, table, Values({}, printed(project, table)), {}):
        assert {one.papers.decision for one in outcome.answers.values()} == {"holds"}, outcome.claim.text


def test_every_claim_names_the_papers_words() -> None:
    for name in ("accuracy", "ablations", "reasoning", "figures"):
        path = REPOSITORY / "workflow" / "papers" / "rcp" / f"{name}.yaml"
        assert all(claim.quote for table in Runs().load(path, REPOSITORY) for claim in table.claims)


def first_runs(project: Project, name: str, row: str) -> dict[tuple[str, str], str]:
    """Key of the first seed's run by column and quantity."""
    cells = [cell for cell in project.cells(name) if cell.row == row]
    return {(cell.column, cell.quantities[0].name): cell.runs[0].key for cell in cells}


#: One experiment in two tables: (table, row, column, quantity) twice.
SHARED = [
    *(
        (("table1", method, column, quantity), (name, f"{method} 2-4-4", column, quantity))
        for method in METHODS
        for name, column, quantity in (
            ("table2", "Llama-2-7B", "perplexity"),
            ("table3", "WizardCoder-7B", "humaneval"),
            ("table3", "MetaMath-7B", "gsm8k"),
        )
    ),
    *(
        (("table2", row, column, "average"), (name, row, column, "average"))
        for row in ROWS
        for name, columns in (("table13", FIRST), ("table14", SECOND))
        for column in columns
    ),
    *(
        (("table4", row, column, "average"), (name, row, column, "average"))
        for row in ("BF16", "BitDistiller", "RCP")
        for name, column in zip(("table15", "table16"), LONG_MODELS, strict=True)
    ),
    *(
        (("table2", f"{method} 2-4-4", "Llama-2-7B", "perplexity"), ("table9", row, "Llama-2-7B", "perplexity"))
        for method, row in zip(METHODS, ("BitDistiller", "+ Rotation", "+ LDP"), strict=True)
    ),
    (("table9", "+ LDP", "Llama-2-7B", "perplexity"), ("table10", "RCP", "Llama-2-7B", "perplexity")),
    *(
        (("table2", row, column, "perplexity"), ("figure1", row, column, "perplexity"))
        for row in ("BF16", "RCP 2-4-4", "BitDistiller 3-4-4")
        for column in MODELS[1:]
    ),
]


def test_an_experiment_in_two_tables_is_run_once(project: Project) -> None:
    for first, second in SHARED:
        one, other = (
            first_runs(project, f"rcp_{name}", row)[column, what] for name, row, column, what in (first, second)
        )
        assert one == other, (first, second)


def test_figure_6_is_of_the_weights_of_table_9(project: Project) -> None:
    keys = [
        {row: [run.weights_key for run in cell.runs] for cell in project.cells(name) if (row := cell.row)}
        for name in ("rcp_figure6", "rcp_table9")
    ]
    rows = {"BitDistiller + Rotate": "+ Rotation", "BitDistiller + Rotate + LWC": "+ LWC", "RCP": "+ LDP"}
    assert {rows[row]: weights for row, weights in keys[0].items()} == {row: keys[1][row] for row in rows.values()}


@pytest.mark.parametrize("table", TABLES)
def test_each_computed_row_is_an_experiment_of_its_own(table: int, project: Project) -> None:
    name = f"rcp_table{table}"
    keys = [tuple(first_runs(project, name, row.name).items()) for row in project.table(name).rows]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("path", ["config/config.yaml", "config/paper.yaml"])
def test_mmlu_is_asked_with_five_examples_and_stands_beside_the_mean_of_four_tasks(path: str) -> None:
    project = shipped_project(path)
    found: dict[str, Any] = {cell.quantities[0].name: cell.metric for cell in project.cells("rcp_table2")}
    assert [*found] == ["perplexity", "mmlu", "average"]
    assert (found["mmlu"].shots, found["average"].shots) == (5, 0)
    if path.endswith("paper.yaml"):
        assert (found["mmlu"].tasks, list(found["average"].tasks)) == (("mmlu",), TASKS)


def test_the_protocol_of_table_11_is_that_of_the_rows(project: Project) -> None:
    recipes = {cell.row: cell.runs[0].recipe for cell in shipped_project("config/paper.yaml").cells("rcp_table2")}
    for bits, method in itertools.product(BITS, METHODS):
        recipe = recipes[f"{method} {bits}"]
        weights, activations, keys = recipe.rounded.scheme, recipe.activations, recipe.keys
        assert (weights.bits, weights.symmetric, weights.group_size) == (int(bits[0]), False, 128)
        assert activations is not None
        assert (activations.bits, activations.symmetric, activations.clip_ratio) == (4, True, 0.9)
        assert (keys is None) == bits.endswith("16") == (recipe.values is None)
        assert keys is None or (keys.bits, keys.symmetric, keys.clip_ratio) == (4, False, 0.95)
        assert (recipe.rotation is not None) == (method != "BitDistiller")


def test_the_number_of_trainings_is_known(project: Project) -> None:
    """Training costs most: a change of a table that adds to it should be one that was meant.

    Fourteen rows on the models of Tables 2 and 3, whose W2A4KV4 is Table 1's too; two rows on those of Table 4 that
    are no model of Table 2; LWC, uniform levels and nothing learned of Table 9, five rows of Table 10 and two of Table
    12; eight of our own report, and RCP before training on the three models of Table 1.
    """
    runs = [
        run for name in project.tables if name.startswith("rcp_") for cell in project.cells(name) for run in cell.runs
    ]
    trained = {run.weights_key for run in runs if {"rcp", "bitdistiller"} & run.recipe.methods.keys()}
    models = {project.digest(column.slot) for column in project.table("rcp_table2").columns}
    long = {project.digest(column) for column in LONG_MODELS} - models
    assert len(models) == 3
    assert len(trained) == len(project.config.seeds) * (14 * (len(models) + 2) + 2 * len(long) + 3 + 5 + 2 + 8 + 3)

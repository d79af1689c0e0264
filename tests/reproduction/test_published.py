"""QuaRot's 17 tables as transcribed, and as data: complete, of one format, and consistent with each other.

Tolerances come from the paper's printed digits only; where the paper contradicts itself the cell is listed here and
not corrected.
"""

import math

import pytest

from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable
from tests.helpers.published import Place, Transcription, experiment_rows

TASKS = ["piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge", "lambada_openai"]
UNITS = {
    "perplexity": "ppl",
    **dict.fromkeys([*TASKS, "average"], "%"),
    "milliseconds": "ms",
    "speedup": "x",
    "saving_factor": "x",
    "gigabytes": "GB",
}
LLAMA2 = ["Llama-2-7B", "Llama-2-13B", "Llama-2-70B"]
LLAMA3 = ["Llama-3-8B", "Llama-3-70B"]
KERNELS = ["FP16", "INT4", "INT4 + FP32 Had", "INT4 + FP16 Had"]

# table: (number of cells, columns in printed order, row keys beyond the common columns)
TABLES = {
    1: (7 * 3, LLAMA2, []),
    2: (2 * 3 * 7, LLAMA2, []),
    3: (3 * 2 * 8, ["Llama-2-7B", "Llama-2-70B"], ["method", "precision"]),
    4: (5 * 3, LLAMA2, []),
    5: (2 * 4, ["1.0", "0.95", "0.9", "0.85"], []),
    6: (10 * 3, LLAMA2, ["k_bits", "v_bits"]),
    7: (4 * 3 * 3 + 3, LLAMA2, ["method", "precision"]),
    8: (3 * 3, LLAMA2, []),
    9: (7 * 3 * 8, LLAMA2, ["method", "precision"]),
    10: (3 * 2 * 8, ["Llama-2-7B", "Llama-2-13B"], ["method", "hadamard_precision"]),
    11: (3 * 2, LLAMA3, []),
    12: (2 * 2 * 7, LLAMA3, []),
    13: (7 * 8, ["Phi-3-mini-4k-instruct"], ["method", "precision"]),
    14: (6 * 6 * 4, KERNELS, ["layer_size", "batch_size"]),
    15: (3 * 6 * 4, KERNELS, ["attention_size", "batch_size"]),
    16: (5 + 4, ["Llama-2-7B", "Llama-2-70B"], ["batch_size"]),
    17: (2 * 10 * 3, ["Llama-2-7B", "Llama-2-70B"], ["method", "batch_size", "sequence_length"]),
}

# Averages that the paper prints but its own six tasks do not give: (table, row, column) -> (printed, mean of the six).
INCONSISTENT_AVERAGES = {
    (9, "QuaRot-GPTQ INT6", "Llama-2-70B"): (77.02, 76.848),
    (10, "QuaRot FP16", "Llama-2-7B"): (66.21, 66.152),
    (13, "QuaRot-GPTQ INT6", "Phi-3-mini-4k-instruct"): (72.67, 72.623),
}


PRINTED = Transcription("quarot", TABLES, UNITS)
read, cells = PRINTED.read, PRINTED.cells


def test_there_is_one_file_per_table() -> None:
    PRINTED.check_files()


@pytest.mark.parametrize("table", TABLES)
def test_a_table_has_the_documented_columns_and_number_of_cells_each_once(table: int) -> None:
    PRINTED.check_format(table)


@pytest.mark.parametrize("table", TABLES)
def test_a_table_covers_every_row_for_every_column_and_metric(table: int) -> None:
    printed = cells(table)
    missing = {
        (row, column, metric)
        for row in {row for row, _, _ in printed}
        for column in TABLES[table][1]
        for metric in {m for r, _, m in printed if r == row}
        if (row, column, metric) not in printed
    }
    # The paper measured the 70B block up to batch 32 only.
    assert missing == ({("batch 64", "Llama-2-70B", "speedup")} if table == 16 else set())


@pytest.mark.parametrize("table", TABLES)
def test_a_composite_row_label_contains_its_keys(table: int) -> None:
    for cell in read(table):
        for key in TABLES[table][2]:
            assert cell[key] == "-" or cell[key] in cell["row"], cell


@pytest.mark.parametrize("table", TABLES)
def test_values_are_positive_numbers_as_printed(table: int) -> None:
    for (row, column, metric), value in cells(table).items():
        if value == "-":
            assert (table, column) == (1, "Llama-2-70B")
            assert row in {"SmoothQuant", "OmniQuant", "Atom-128G"}
        elif value in {"Inf", "NaN"}:
            assert (table, metric) == (7, "perplexity")
        else:
            assert 0 < float(value) < math.inf
            if UNITS[metric] == "%":
                assert float(value) < 100
            digits = 3 if table in {5, 14, 15} or metric == "gigabytes" else 2
            assert len(value.partition(".")[2]) == digits, (row, column, value)


@pytest.mark.parametrize("table", [2, 3, 9, 10, 12, 13])
def test_a_printed_average_is_the_mean_of_the_six_tasks(table: int) -> None:
    # Six tasks rounded to 0.01 move their mean by up to 0.005, and the average is rounded by up to 0.005.
    PRINTED.check_averages(table, TASKS, 0.01, INCONSISTENT_AVERAGES)


def test_memory_savings_are_the_ratio_of_the_printed_gigabytes() -> None:
    printed = cells(17)
    factors = [key for key in printed if key[2] == "saving_factor"]
    assert len(factors) == 20
    for row, column, metric in factors:
        quarot = float(printed[row, column, "gigabytes"])
        baseline = float(printed[row.replace("QuaRot", "Baseline"), column, "gigabytes"])
        # Gigabytes are rounded (or cut) at 0.001 and the factor at 0.01, so only an interval is known.
        lowest = (baseline - 0.0005) / (quarot + 0.0005) - 0.005
        highest = (baseline + 0.0005) / (quarot - 0.0005) + 0.005
        assert lowest <= float(printed[row, column, metric]) <= highest, (row, column)


# One experiment printed in two tables, as (table, row); compared over all columns and metrics that both print.
REPEATED_ROWS = [
    ((1, "Baseline"), (4, "Baseline")),
    ((1, "Baseline"), (6, "K16 V16")),
    ((1, "Baseline"), (7, "Baseline")),
    ((1, "Baseline"), (8, "Baseline")),
    ((1, "Baseline"), (9, "Baseline FP16")),
    ((1, "QuaRot"), (4, "QuaRot")),
    ((1, "QuaRot"), (8, "QuaRot (Hadamard)")),
    ((1, "QuaRot"), (9, "QuaRot-GPTQ INT4")),
    ((1, "QuaRot-128G"), (4, "QuaRot-128G")),
    ((2, "FP16"), (9, "Baseline FP16")),
    ((2, "QuaRot"), (9, "QuaRot-GPTQ INT4")),
    ((3, "Baseline FP16"), (9, "Baseline FP16")),
    ((3, "QuaRot-RTN INT4"), (9, "QuaRot-RTN INT4")),
    ((3, "QuaRot-RTN INT8"), (9, "QuaRot-RTN INT8")),
    ((10, "Baseline"), (9, "Baseline FP16")),
    ((10, "QuaRot FP32"), (9, "QuaRot-GPTQ INT4")),
]


@pytest.mark.parametrize(("first", "second"), REPEATED_ROWS)
def test_an_experiment_printed_in_two_tables_has_one_value(first: Place, second: Place) -> None:
    assert len(PRINTED.row(*first).keys() & PRINTED.row(*second).keys()) >= 3
    PRINTED.check_repeated(first, second)


def test_every_accuracy_table_and_the_first_figure_are_data(project: Project) -> None:
    names = {name for name, table in project.of(RunTable).items() if table.paper == "quarot"}
    reports = {"quarot_cache", "quarot_groupsizes", "quarot_groups", "quarot_switches"}
    assert names == {*(f"quarot_table{n}" for n in range(1, 14)), "quarot_figure1", *reports}


@pytest.mark.parametrize("table", range(1, 14))
def test_rows_and_columns_are_those_of_the_paper(table: int, project: Project) -> None:
    """Beyond them stand rows that test why a claim is contradicted, and for comparison the baseline of Table 5 and
    Table 11's columns of Llama-2."""
    kinds = {"perplexity" if cell["metric"] == "perplexity" else "zero_shot" for cell in read(table)}
    ours = {row for claim in project.table(f"quarot_table{table}").claims for row in experiment_rows(claim)}
    PRINTED.check_data(project, table, ours | ({"Baseline"} if table == 5 else set()), kinds)


@pytest.mark.parametrize("table", range(1, 14))
def test_claims_hold_by_the_papers_own_numbers(table: int, project: Project) -> None:
    PRINTED.check_claims(project, table)


@pytest.mark.parametrize(("first", "second"), REPEATED_ROWS)
def test_an_experiment_printed_in_two_tables_is_run_once(first: Place, second: Place, project: Project) -> None:
    def runs_of(table: int, row: str) -> dict[tuple[str, str], list[str]]:
        cells = [cell for cell in project.cells(f"quarot_table{table}") if cell.row == row]
        return {(cell.column, cell.metric.kind): [run.key for run in cell.runs] for cell in cells}

    one, other = runs_of(*first), runs_of(*second)
    shared = one.keys() & other.keys()
    assert len(shared) >= 2
    assert {place: one[place] for place in shared} == {place: other[place] for place in shared}


def test_what_acts_at_run_time_alone_needs_no_weights_of_its_own(project: Project) -> None:
    """Clip ratios of inputs and cache, bits of the cache and BOS: one set of weights per model and seed."""
    weights = {name: set[str]() for name in ("quarot", "rotated")}
    for cell in project.cells("quarot_switches"):
        if cell.row in ("QuaRot", "Inputs not clipped", "KV cache not clipped", "Symmetric KV cache", "QuaRot, no BOS"):
            weights["quarot"] |= {run.weights_key for run in cell.runs}
    for name in ("quarot_table5", "quarot_table6", "quarot_figure1"):
        table = project.table(name)
        cells = [cell for cell in project.cells(name) if cell.row != table.baseline]
        weights["rotated"] |= {run.weights_key for cell in cells for run in cell.runs}
    seeds = len(project.config.seeds)
    assert {name: len(keys) for name, keys in weights.items()} == {"quarot": 3 * seeds, "rotated": 3 * seeds}


def test_each_row_of_the_switches_is_a_run_of_its_own(project: Project) -> None:
    cells = [cell for cell in project.cells("quarot_switches") if cell.column == "Llama-2-7B"]
    assert len({cell.runs[0].key for cell in cells}) == len(cells) == len(project.table("quarot_switches").rows)

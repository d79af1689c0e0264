"""Reports say only what run files hold: ours, the paper's, claims, and where every number comes from."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from reproduction.claims import claims
from reproduction.commands.report import report_app
from reproduction.frame import values as collected
from reproduction.frame.lines import write_frame
from reproduction.render.pages.markdown import markdown
from reproduction.render.pages.runs import runs_report
from reproduction.run.results import read_result, table_path, write_result
from reproduction.scoreboard import page as html
from reproduction.scoreboard import standings as scoreboard
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import AVERAGE, PERPLEXITY, called
from reproduction.words import describe
from reproduction.words.numbers import broken, loss_words, show, show_change
from rotquant.foundation.environment import environment
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import write_text
from rotquant.recipes.presets import PRESETS, preset
from rotquant.recipes.schemes import Perplexity
from tests.helpers.project import CONFIG, PUBLISHED, TABLES
from tests.helpers.reports import KINDS, compute, every_kind, load, page, rows, table


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    loaded = load(tmp_path, monkeypatch, table("table1"))
    compute(loaded)
    return loaded


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """One table of each kind, computed; tests leave its run files as they are."""
    with every_kind(tmp_path_factory.mktemp("kinds")) as loaded:
        yield loaded


def test_a_cell_is_the_mean_and_sample_deviation_over_its_seeds(project: Project) -> None:
    values, results = collected.collect(project, project.table("quarot_table1"))
    cell = values["QuaRot", "Llama-2-7B", "perplexity"]
    assert cell.values == (11.0, 11.1)
    assert cell.mean == pytest.approx(11.05)
    assert cell.deviation == pytest.approx(0.1 / math.sqrt(2))
    assert values["Baseline", "Llama-2-7B", "perplexity"].deviation is None
    assert values.published["QuaRot", "Llama-2-7B", "perplexity"].mean == 8.37
    assert len(results) == 6


def test_a_tables_files_keep_every_number(kinds: Project) -> None:
    for name, chosen in kinds.tables.items():
        frame = collected.collect(kinds, chosen)[0].frame
        write_frame(kinds.root / table_path(name), frame)
        parquet = (kinds.root / table_path(name)).with_suffix(".parquet")
        assert pd.read_parquet(parquet, dtype_backend="pyarrow").equals(frame)
    lines = (kinds.root / "results/tables/quarot_table1.csv").read_text().splitlines()
    key = kinds.cells("quarot_table1")[2].runs[1].key
    assert f"QuaRot,Llama-2-7B,perplexity,1,11.1,11.05,0.0707106781186545,,8.37,,computed,{key},," in lines


def test_the_page_shows_ours_the_papers_and_the_changes_of_both(project: Project) -> None:
    text = page(project)
    assert "# QuaRot, Table 1: small" in text
    assert "| QuaRot | 11.05 ± 0.07 | *8.37* | 11.05 ± 0.07 | - |" in text
    assert "| QuaRot | +10.5 ± 0.7 % | *+53.0 %* | +10.5 ± 0.7 % |" in text
    assert (
        "| The baseline is better than QuaRot. | ✅ agrees: Llama-2-7B: 10.00 against 11.05 | *5.47 against 8.37* |"
        in text
    )


def test_published_numbers_have_the_papers_decimals_and_ours_at_least_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = load(tmp_path, monkeypatch, table("table1"))
    text = PUBLISHED.replace("5.47", "5.5").replace("4.88", "4.9").replace("8.37", "8.4")
    write_text(project.root / "workflow/papers/quarot/published/small.csv", text)
    compute(project)
    assert "| QuaRot | 11.05 ± 0.07 | *8.4* | 11.05 ± 0.07 | - |" in page(project)


def test_a_table_of_one_seed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tmp_path, monkeypatch, table("table1")).root / "config/config.yaml"
    write_text(config, config.read_text().replace("seeds:\n- 0\n- 1\n", "seeds:\n- 0\n"))
    project = load_project(root=tmp_path)
    compute(project)
    assert "One run a number; where something is random, of seed 0." in page(project)


def test_the_page_says_where_each_number_comes_from(project: Project) -> None:
    text = page(project)
    assert environment()["cpu"] in text
    for kind in ("runs", "weights"):
        assert re.search(rf"- Code of {kind}: (commit `\w{{12}}`|rotquant ).*, digest `0123456789abcdef`\n", text)
    assert "1,234 characters" in text
    assert "not the recorded text" in text
    assert "Other models stand for the paper's: compare orders and losses, not values." in text
    assert "6 runs and 4 stored weights: 17 s" in text  # 6 times 1.5 s and 4 times 2 s


def test_claims_of_a_table_of_nobodys_paper_are_hypotheses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = load(tmp_path, monkeypatch, table("dither", published=None))
    compute(project, "quarot_dither")
    text = page(project, "quarot_dither")
    assert "| Hypothesis | Here |" in text
    assert "| The baseline is better than QuaRot. | ✅ confirmed: Llama-2-7B: 10.00 against 11.05 |" in text
    assert "| Method | Llama-2-7B<br>here: small | Llama-2-13B<br>here: larger |" in text
    assert not any(words in text for words in ("paper's", "*published", "reported"))


def test_steps_of_each_block_are_spoken_of_where_a_method_has_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline, *_ = TABLES["tables"][0]["rows"]
    rounded, trained = ({"name": "QuaRot", "method": name} for name in ("quarot", "omniquant"))
    tables = (table(name, rows=[baseline, row]) for name, row in (("rounded", rounded), ("trained", trained)))
    project = load(tmp_path, monkeypatch, *tables)
    for name in project.tables:
        compute(project, name)
    said = {name: page(project, name) for name in project.tables}
    assert all("| Method | Tokens of text |" in text and "Seconds are means" in text for text in said.values())
    assert "OmniQuant" not in said["quarot_rounded"]
    assert "\nSteps of OmniQuant are those of each block. Seconds are means" in said["quarot_trained"]


def test_wall_time_counts_shared_weights_once(kinds: Project) -> None:
    assert "6 runs and 2 stored weights: 13 s" in page(kinds, "quarot_table3")  # both metrics: 6 x 1.5 s + 2 x 2 s


def test_a_contradicted_claim_is_shown_with_its_numbers_and_the_experiment_that_tests_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = {"better": {"row": "QuaRot", "than": ["Six bits"]}}
    asked = {"cause": "Two bits more change nothing", "target": "quarot_table9", "check": check}
    claim = {**TABLES["tables"][0]["claims"][0], "quote": "outliers vanish", "experiment": asked}
    bound = {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "points": 2.0}}
    setting, fact = ({"text": name, "section": "5.2", name: bound} for name in ("setting", "fact"))
    plain = {**claim, "text": "Without a reason.", "mechanism": {"no_worse": claim["mechanism"]["better"]}}
    del plain["experiment"]
    again = {**plain, "text": "Again."}
    other = table("table9", rows=rows("QuaRot", "Six bits"), claims=[])
    project = load(tmp_path, monkeypatch, table("table1", claims=[claim, plain, setting, fact, again]), other)
    compute(project)
    text = page(project)
    assert "Two bits" not in text
    assert text.partition("<details>")[0].count("✅ agrees") == 2
    compute(project, Baseline=40.0)
    text = page(project)
    first, _, details = text.partition("<details>")
    assert first.count("❌ disagrees") == 2
    assert "Why not" not in first
    assert "It asks what statement 2 asks; both count once." in details
    assert "**1. The baseline is better than QuaRot.** Section 5.1: “outliers vanish”" in details
    assert "Cause unknown: `quarot_table9` would test one and is not computed. Two bits more change nothing." in details
    assert "Cause unknown: no experiment tests one." in details
    assert "| setting | not tested here: Llama-2-7B: 40.00 to 11.05 (at most 2 asked) | *5.47 to 8.37* |" in first
    assert "The paper's setting: not tested here; the paper's numbers: contradicted." in details
    assert "| fact |" not in first
    gain = "| Llama-2-7B | 40.00 against 11.05 | gain -28.95 [-29.59, -28.31] | contradicted | *5.47 against 8.37* |"
    assert (
        "Direction, by perplexity: not reproduced.\n\n| Comparison | Here | Effect | Decision | *Paper* |\n" in details
    )
    assert gain in details
    found = {
        "Six bits": (32.5, "supports it (Llama-2-7B: 11.05 against 32.55)."),
        "QuaRot": (14.0, "speaks against"),
    }
    for row, (value, said) in found.items():
        compute(project, "quarot_table9", **{"Baseline": 40.0, row: value})
        text = page(project)
        assert f"Tested cause: Two bits more change nothing. `quarot_table9` {said}" in text
        why = "Why not: Two bits more change nothing (`quarot_table9`)."
        assert (why in text.partition("<details>")[0]) == (row == "Six bits")


def test_averages_stand_side_by_side_and_tasks_apart(kinds: Project) -> None:
    text = page(kinds, "quarot_table3")
    assert "| Method | PPL | *published* | Avg. | *published* |" in text
    assert "| QuaRot | 11.05 ± 0.07 | *6.10* | 11.05 ± 0.07 | *65.64* |" in text
    assert "| Method | Avg. | Last word | Grammar |" in text
    assert "| Method | Avg. | PIQA |" in text
    assert "| QuaRot | *65.64* | *76.77* |" in text


def test_the_page_says_how_accuracy_is_measured(kinds: Project) -> None:
    text = page(kinds, "quarot_table3")
    assert "suite `shipped`" in text
    assert "A task shows `acc` where its choices are words and `acc_norm` where they are phrases" in text
    assert "| `acc` | 25.0 | 1,200 |" in text  # grammar: measure, chance, items
    assert "| chance | - | 0.0 | 25.0 |" in text
    assert "| standard error | 0.7 | 0.9 | 0.9 |" in text  # of 10 % of 1000 items, and of the mean of two such
    assert "Every item begins with BOS; all items." in text
    assert "suite shipped, lm-eval 0.4.13, sha256 of last_word `efefefefefef`, piqa from the hub" in text


def test_columns_that_are_settings_share_one_checkpoint_and_print_the_papers_decimals(kinds: Project) -> None:
    text = page(kinds, "quarot_table5")
    assert "| 1.0, 0.85 | [models/small]" in text or "| 1.0, 0.85 | `models/small`" in text
    assert "| QuaRot | 11.050 ± 0.071 | *5.938* | 11.050 ± 0.071 | *5.850* |" in text
    assert "| QuaRot, 0.85 | `quarot` |" in text
    assert "Change from Baseline" in text


def test_shared_checkpoints_and_numbers_from_other_tables_are_named(kinds: Project) -> None:
    text = page(kinds, "quarot_table11")
    assert text.count("Llama-3-8B, Llama-2-7B") >= 2  # the column, and what it is
    assert "The *published* numbers of Llama-2-7B are from the paper's" in text
    assert "| Method | Llama-3-8B, Llama-2-7B<br>here: small | *Llama-2-7B* |" in text
    assert "| QuaRot | 11.05 ± 0.07 | *8.37* |" in text  # one run, one number


def test_a_report_of_our_own_names_rare_published_numbers_in_brackets(kinds: Project) -> None:
    text = page(kinds, "quarot_switches")
    assert text.startswith("# QuaRot: small")
    assert "| QuaRot | **11.05 ± 0.07** (*8.37*) | **11.05 ± 0.07** |" in text
    assert "| One | 12.05 ± 0.07 | 12.05 ± 0.07 |" in text
    assert "bos none (rows Three)" in text


def test_a_report_of_our_own_has_claims_that_the_papers_numbers_decide_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = load(tmp_path, monkeypatch, table("switches"))
    compute(project, "quarot_switches")
    text = page(project, "quarot_switches")
    assert "✅ agrees: Llama-2-7B: 10.00 against 11.05 | *5.47 against 8.37* |" in text


def test_magnitudes_have_no_loss(kinds: Project) -> None:
    text = page(kinds, "quarot_figure1")
    assert "| Method | max/median | max | median |" in text
    assert "Change from" not in text
    assert "is better" not in text


@pytest.mark.parametrize(("value", "printed"), [(math.inf, "Inf"), (math.nan, "NaN"), (123456.0, "1.23e+05")])
def test_a_broken_network_is_a_result(project: Project, value: float, printed: str) -> None:
    compute(project, QuaRot=value)
    text = page(project)
    assert f"| QuaRot | {printed} " in text
    assert ("not finite: the network's outputs overflow" in text) == (not math.isfinite(value))


def test_a_number_that_is_not_finite_is_counted_as_such(kinds: Project, tmp_path: Path) -> None:
    """In run files, tables, claims, the page, the scoreboard and the index; one seed of two is enough."""
    project = load_project(root=shutil.copytree(kinds.root, tmp_path / "copy"))
    chosen = project.table("quarot_table3")
    broken = next(cell for cell in project.cells(chosen.id) if cell.row == "QuaRot" and cell.metric.kind == "zero_shot")
    path = project.results.run(broken.runs[0].key)
    result = read_result(path)
    write_result(
        path, replace(result, metrics={**result.metrics, "average": math.nan, "grammar": math.nan}, samples={})
    )
    values, results = collected.collect(project, chosen)
    again = values["QuaRot", "Llama-2-7B", "average"]
    assert [math.isfinite(number) for number in (*again.values, again.mean)] == [False, True, False]
    about = chosen.claims[0].model_copy(update={"quantity": "average"})
    chosen = chosen.model_copy(update={"claims": (*chosen.claims, about)})
    text = markdown(runs_report(project, chosen, values, results)).replace("\u00a0", " ")
    assert "| NaN | *65.64* |" in text
    assert "✅ agrees: " in text  # the perplexity is a number
    assert "not checkable: QuaRot, Llama-2-7B: NaN, not finite" in text
    object.__setattr__(project, "tables", {**project.tables, chosen.id: chosen})
    write_text(project.root / f"reports/{chosen.id}.md", text)
    assert "Of 2 directions that they claim 1 agree, 0 disagree, and 1 are not tested here." in scoreboard.index(
        project
    )
    shown = html.index(project)
    assert '<span class="badge not-tested-here" title="directions, not tested here">? 1</span>' in shown
    assert "not checkable: QuaRot" in shown


def test_a_table_without_a_column_to_compute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(tmp_path, monkeypatch, table("table1"))
    slots = {name: {**slot, "compute": False} for name, slot in CONFIG["slots"].items()}
    (tmp_path / "config/config.yaml").write_text(json.dumps({**CONFIG, "slots": slots}))
    project = load_project(root=tmp_path)
    chosen = project.table("quarot_table1")
    with pytest.raises(ResultError, match=r"no column to compute: its slots \(Llama-2-7B, Llama-2-13B\)"):
        collected.collect(project, chosen)
    assert claims.outcomes(project, chosen, collected.Values({}, {}), {}) == ()


def test_nothing_can_be_lost_in_percent_of_nothing() -> None:
    """An accuracy of zero: a handful of items, none answered."""
    assert collected.loss_percent(AVERAGE, 0.0, 0.0) is None
    assert collected.loss_percent(AVERAGE, 45.0, 50.0) == 10.0
    assert collected.loss_percent(PERPLEXITY, 6.0, 5.0) == 20.0


def test_numbers_are_printed_as_the_paper_prints_them() -> None:
    assert show(5.4721) == "5.47"
    assert show(5.4721, 0.01234, 3) == "5.472\u00a0±\u00a00.012"
    assert [show(value) for value in (None, math.inf, math.nan)] == ["-", "Inf", "NaN"]
    assert show_change(-11.52, 0.4) == "-11.5\u00a0±\u00a00.4\u00a0%"
    assert show_change(1168.4) == "+1168\u00a0%"
    assert show_change(54321.0) == "+5.4e+04\u00a0%"


def test_losses_have_the_word_of_their_direction() -> None:
    assert loss_words(PERPLEXITY) == "increase of perplexity"
    assert loss_words(AVERAGE) == "loss of average accuracy"
    (of_code,) = called(Perplexity(corpus="code"), "code")
    assert loss_words(of_code) == "increase of perplexity on code"


def test_missing_and_damaged_run_files_are_named(project: Project) -> None:
    chosen = project.table("quarot_table1")
    key = project.cells(chosen.id)[0].runs[0].key
    path = project.results.run(key)
    good = path.read_text()
    for damaged in (good[:100], "{}", "[1]", good.replace('"perplexity": 10', '"perplexity": "ten"')):
        path.write_text(damaged)
        with pytest.raises(ResultError, match=rf"{path.name} is damaged .*delete it and run again"):
            collected.collect(project, chosen)
    data = json.loads(good)
    data["weights"] = (data["weights"] or {}) | {"stages": "GPTQ"}
    path.write_text(json.dumps(data))
    with pytest.raises(ResultError, match=rf"{path.name} is damaged \(stages"):
        collected.collect(project, chosen)
    data = json.loads(good)
    data["run"]["dtype"] = "bfloat16"
    path.write_text(json.dumps(data))
    with pytest.raises(ResultError, match="its name is not the key of its run"):
        read_result(path)
    path.unlink()
    with pytest.raises(ResultError, match=f"runs of {chosen.id} are not computed, such as {path.name}"):
        collected.collect(project, chosen)


def test_the_scoreboard_counts_what_exists(project: Project) -> None:
    text = scoreboard.index(project)
    count = sum(table.is_printed for table in project.tables.values())
    assert f"0 of {count} of the papers' tables" in text
    (project.root / "reports").mkdir()
    (project.root / "reports/quarot_table1.md").write_text(page(project))
    text = scoreboard.index(project)
    assert f"1 of {count} of the papers' tables" in text
    assert "[quarot_table1](quarot_table1.md)" in text
    assert "computed | 1 | 0 | 0 |" in text


def test_the_gallery_is_a_copy_without_links_to_files_that_are_not_committed(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    (project.root / "reports/figures").mkdir(parents=True)
    (project.root / "reports/figures/quarot_table1.svg").write_text("<svg/>")
    card = "[card](../workflow/resources/models/rq/README.md)"
    bench = "[record](../results/bench/some-gpu/k.json)"
    text = f"[`k`](../results/runs/k.json) {card} {bench} ![f](figures/quarot_table1.svg)"
    (project.root / "reports/quarot_table1.md").write_text(text)
    outcome = CliRunner().invoke(report_app, ["gallery"])
    assert outcome.exit_code == 0, outcome.output
    copied = (project.root / "docs/gallery/quarot_table1.md").read_text()
    links = "[card](../../workflow/resources/models/rq/README.md) [record](../../results/bench/some-gpu/k.json)"
    assert copied == f"`k` {links} ![f](figures/quarot_table1.svg)"
    assert (project.root / "docs/gallery/figures/quarot_table1.svg").exists()


def test_copies_in_two_folders_name_each_other_and_what_measures_no_model_is_in_one(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    card = "[card](../workflow/resources/models/rq/MODEL_CARD.md)"
    origins = "<summary>Provenance</summary>\n\n- "
    models = f"# T\n\n{card}\n\n{origins}Models: m"
    files = {
        "reports/quarot_table1.md": models,
        "reports/quarot_table2.md": models,
        "reports/quarot_table14.md": f"# T\n\n[one](quarot_table1.md) [two](quarot_table2.md)\n\n{origins}",
        "reports/index.md": "`snakemake --cores all reports/`\n\n[one](quarot_table1.md) [time](quarot_table14.md)",
        "reports/figures/quarot_table14.svg": "<svg>rotquant</svg>",
        "docs/gallery/quarot_table1.md": f"# T\n\n{origins}",
        "docs/gallery/quarot_table14.md": origins,
        "docs/gallery/index.md": "# Gallery",
    }
    for name, text in files.items():
        (project.root / name).parent.mkdir(parents=True, exist_ok=True)
        (project.root / name).write_text(text)
    for _ in range(2):
        outcome = CliRunner().invoke(report_app, ["gallery", "-o", "docs/gallery/shipped", "--beside", "docs/gallery"])
        assert outcome.exit_code == 0, outcome.output
    folder = project.root / "docs/gallery"
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    models = models.replace("(../", "(../../../")
    assert found == {
        "shipped/quarot_table1.md": models.replace(
            "# T\n", "# T\n\nOn a pretrained model: [quarot_table1](../quarot_table1.md).\n"
        ),
        "shipped/quarot_table2.md": models,
        "shipped/index.md": "`snakemake --cores all reports/`\n\nOn a pretrained model: [index](../index.md).\n\n"
        "[one](quarot_table1.md) [time](../quarot_table14.md)",
        "quarot_table1.md": "# T\n\nOn the models that ship with the project: "
        f"[quarot_table1](shipped/quarot_table1.md).\n\n{origins}",
        "quarot_table14.md": f"# T\n\n[one](quarot_table1.md) [two](shipped/quarot_table2.md)\n\n{origins}",
        "figures/quarot_table14.svg": "<svg>rotquant</svg>",
        "index.md": "# Gallery",
    }


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_recipe_is_described_in_one_line_that_differs_from_the_others(name: str) -> None:
    lines = {other: describe.settings(preset(other)) for other in PRESETS}
    assert "\n" not in lines[name]
    assert [other for other in lines if lines[other] == lines[name]] == [name]


def folded(text: str, summary: str) -> str:
    """A part of a page that is folded."""
    return text.partition(f"<details><summary>{summary}</summary>")[2].partition("</details>")[0]


def with_endpoints(project: Project, name: str = "quarot_table1", **finer: float) -> None:
    """Add to the run files of a table KL divergences and log-odds, by row; none of rows that are not named."""
    for cell in project.cells(name):
        for run in cell.runs if cell.row in finer else ():
            path, value = project.results.run(run.key), finer[cell.row] * (1 + run.seed / 100)
            found = read_result(path)
            metrics, samples = dict(found.metrics), dict(found.samples)
            if run.metric.kind == "perplexity":
                metrics |= {"kl": value, "kl_median": value / 2, "flips": 100 * value}
                samples |= {"kl": [value * 1.1, value * 0.9] * 25, "flips": [value, value]}
            else:
                metrics |= {"log_odds": value, "log_odds_median": value / 2, "grammar_log_odds": value}
                samples |= {"grammar_log_odds": [value], "grammar_choices": "0" if cell.row == "Baseline" else "1"}
            write_result(path, replace(found, metrics=metrics, samples=samples))


def test_divergences_have_a_section_of_their_own_and_decide_beside_perplexity(tmp_path, monkeypatch) -> None:
    """Perplexity says that QuaRot, 11, is better than QUIK, 12; by KL divergence it is worse."""
    claim = {"text": "Better.", "section": "1", "mechanism": {"better": {"row": "QuaRot", "than": ["QUIK"]}}}
    rows = [*TABLES["tables"][0]["rows"], {"name": "QUIK", "method": "quik"}]
    project = load(tmp_path, monkeypatch, table("table1", rows=rows, claims=[claim], figure=None))
    compute(project)
    assert "KL divergence" not in page(project)
    assert "Direction, by perplexity: " in page(project)
    with_endpoints(project, Baseline=0.0, QuaRot=0.3, QUIK=0.2)
    text = page(project)
    section = folded(text, "KL divergence to the full-precision model")
    assert "| Baseline | 0.000" in section
    assert "| QuaRot | 0.30" in section
    assert " ± " in section
    assert "0.15" in section  # the median window
    assert "30." in section  # flips in percent
    assert "Direction, by KL divergence: endpoints disagree." in text
    assert "Direction, by perplexity: reproduced, which does not decide." in text
    assert "endpoints disagree: Llama-2-7B: KL divergence 0.3" in text
    assert "The reference of a row with a prefix is the full-precision model with the same prefix." in section
    frame = collected.collect(project, project.table("quarot_table1"))[0].frame
    assert {"kl", "kl_median", "flips"} <= {*frame["quantity"]}


def test_log_odds_stand_beside_accuracy_and_flips_need_the_unquantized_run(tmp_path, monkeypatch) -> None:
    project = load(tmp_path, monkeypatch, *KINDS)
    compute(project, "quarot_table3")
    with_endpoints(project, "quarot_table3", QuaRot=0.5)
    text = page(project, "quarot_table3")
    section = folded(text, "Log-odds of the right answer")
    assert "0.50" in section
    assert "so none is known" in section
    with_endpoints(project, "quarot_table3", Baseline=0.7)
    section = folded(page(project, "quarot_table3"), "Log-odds of the right answer")
    assert "so none is known" not in section
    assert "100.0" in section  # the one choice of grammar is another one


def test_a_table_with_run_files_from_before_is_shown_without_what_they_lack(tmp_path, monkeypatch) -> None:
    """Of some of the rows: the others have no number, and perplexity decides."""
    project = load(tmp_path, monkeypatch, table("table1"))
    compute(project)
    with_endpoints(project, QuaRot=0.3)
    text = page(project)
    section = folded(text, "KL divergence to the full-precision model")
    assert "| QuaRot | 0.30" in section
    assert "| Baseline |" not in section
    assert "which does not decide" not in text


def test_rows_far_beyond_the_baseline_have_a_sentence_on_what_their_digits_are_worth() -> None:
    """By perplexity, in any column, and once for each row."""
    found = {
        ("FP16", "A"): 8.0,
        ("Plain", "A"): 4000.0,
        ("Plain", "B"): 9000.0,
        ("Rotated", "A"): 79.0,
        ("FP16", "B"): 9.0,
    }
    ours = {(*place, PERPLEXITY.name): collected.Number(value) for place, value in found.items()}
    ours |= {
        ("Rotated", "A", AVERAGE.name): collected.Number(1000.0),
        ("FP16", "A", AVERAGE.name): collected.Number(1.0),
    }
    (sentence,) = broken("FP16", collected.Values(ours, {}))
    assert sentence.startswith("More than 10 times the baseline's perplexity: Plain. ")
    rest = {place: number for place, number in ours.items() if place[0] != "Plain"}
    assert broken("FP16", collected.Values(rest, {})) == []

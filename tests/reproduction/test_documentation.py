"""The documentation site: pages made from code say what the code says, and links of checked-in pages lead to files.

`make site` builds it and refuses what leads nowhere on the site; here nothing is built.
"""

import re
from pathlib import Path

import pytest
import yaml

from rotquant.recipes.presets import all_presets
from rotquant.recipes.recipe import find_method
from rotquant.recipes.registry import built_in_names
from scripts.documentation import links, methods, reference, words
from tests.helpers.project import REPOSITORY

WRITTEN = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "config/README.md"),
    *(path.relative_to(REPOSITORY).as_posix() for path in sorted((REPOSITORY / "docs").rglob("*.md"))),
]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return methods.pages() | reference.pages()


@pytest.mark.parametrize("page", WRITTEN)
def test_links_of_checked_in_pages_lead_to_files_and_headings(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]+)?\)", text):
        if "://" in target:
            continue
        path = (REPOSITORY / page).parent / target if target else REPOSITORY / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}, anchor


def test_every_method_has_a_page_with_its_settings_and_reports(pages: dict[str, str]) -> None:
    for name in built_in_names():
        page, method = pages[f"methods/{name}.md"], find_method(name)
        assert method.source in page
        for field in method.model_fields:
            assert f"- **`{field}`**: " in page, (name, field)
        reports = re.findall(r"\]\(\.\./gallery/([\w/]+\.md)\)", page)
        assert all((REPOSITORY / "docs/gallery" / report).is_file() for report in reports), name
    assert "[quarot_table1](../gallery/quarot_table1.md)" in pages["methods/gptq.md"]
    assert "[quarot_table1](../gallery/quarot_table1.md)" not in pages["methods/spinquant.md"]
    assert "[spinquant_table1](../gallery/spinquant_table1.md)" in pages["methods/spinquant.md"]
    assert "[spinquant_table2](../gallery/shipped/spinquant_table2.md)" in pages["methods/spinquant.md"]


def test_a_method_page_names_equations_and_what_paper_and_code_disagree_about(pages: dict[str, str]) -> None:
    page = pages["methods/smoothquant.md"]
    equations = page.partition("## Equations in the code")[2]
    assert "| `SmoothQuant` | SmoothQuant (Xiao et al. 2023, Eq. 4): s_j" in equations
    disputed = page.partition("## Where it differs")[2].partition("## Equations")[0]
    assert "`alpha`, default `0.5`: How much of the difficulty" in disputed
    assert "SmoothQuant's repository (README, examples/ppl_eval.sh)" in disputed


def test_every_preset_is_listed_with_its_methods(pages: dict[str, str]) -> None:
    index = pages["methods/index.md"]
    assert all(f"<a id='{name}'></a>`{name}` (" in index for name in all_presets())
    (quik,) = (line for line in index.splitlines() if "<a id='quik'>" in line)
    assert quik.endswith("Made of [gptq](gptq.md), [outliers](outliers.md).")


def test_commands_and_keys_are_those_of_the_code(pages: dict[str, str]) -> None:
    assert "- **`--method`**: default `quarot`" in pages["reference/quantize.md"]
    assert "## sync-tracking" in pages["reference/runs.md"]
    assert "- **`groups_per_row`**: whole number" in pages["reference/configuration.md"]
    for link in re.findall(r"\]\(#(\w+)\)", pages["reference/configuration.md"]):
        assert f"\n## {link}\n".lower() in pages["reference/configuration.md"].lower()


def test_the_navigation_names_pages_that_exist(pages: dict[str, str]) -> None:
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))

    def places(entry: object) -> list[str]:
        inner = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
        return [entry] if isinstance(entry, str) else [place for one in inner for place in places(one)]

    for place in places(settings["nav"]):
        assert place in pages or (REPOSITORY / links.source_of(place)).is_file(), place


def test_a_page_keeps_its_links_on_the_site() -> None:
    text = "[a](../CONTRIBUTING.md#rooms) [b](../results/bench/nvidia-h200) [c](../docs/guide.md) [d](https://e.org)"
    assert links.rewritten("guide.md", text) == "[a](project/CONTRIBUTING.md#rooms) b [c](guide.md) [d](https://e.org)"
    text = "[run](../results/runs/0.json) [card](../../workflow/resources/models/rq-7b/MODEL_CARD.md)"
    card = "[card](../project/workflow/resources/models/rq-7b/MODEL_CARD.md)"
    assert links.rewritten("gallery/x.md", text) == f"run {card}"


def test_files_that_pages_link_to_join_the_site_with_those_that_they_link_to() -> None:
    found = links.outside_files({"a.md": "[c](../config/README.md)"}, lambda path: Path(path).read_text())
    assert found["project/config/README.md"] == "config/README.md"
    assert not any(path.startswith("docs/") for path in found.values())


def test_fields_that_a_docstring_explains_are_a_list() -> None:
    text = "A thing.\n\nname: its name,\n    in words.\nsize, width: numbers.\n\nRaises:\n    ValueError: no."
    listed = (
        "A thing.\n\n\n- `name`: its name,\n    in words.\n- `size`, `width`: numbers.\n\nRaises:\n    ValueError: no."
    )
    assert words.with_lists(text) == listed

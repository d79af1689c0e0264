"""reports/index.html: a file on its own that says what scoreboard, tables and claims say, and nothing else."""

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reproduction.commands.report import report_app
from reproduction.frame import values as tables
from reproduction.frame.lines import write_frame
from reproduction.render.figures import draw as figures
from reproduction.render.html.inline_svg import inline_svg
from reproduction.render.html.pages import render_pages
from reproduction.run.results import RunResult, table_path, write_result
from reproduction.scoreboard import page as html
from reproduction.sources import load_project
from reproduction.tables.project import Project
from reproduction.tables.quantities import quantities
from reproduction.words import templates
from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import write_text
from tests.helpers.circumstances import circumstances
from tests.helpers.project import Copy, checkpoints_by_name
from tests.helpers.reports import page as markdown_page

HOSTILE = '</script><img src=x onerror=alert(1)> & "quotes" of `code`'
ROWS = [
    {"name": "Baseline", "labels": [16], "method": "baseline"},
    {"name": "QuaRot", "labels": [4], "method": "quarot-rtn"},
]
COMMON = {
    "title": "small",
    "section": "5.1",
    "caption": HOSTILE,
    "notes": [HOSTILE],
    "label_columns": ["bits"],
    "baseline": "Baseline",
    "rows": ROWS,
}
FOUR_BITS = {"better": {"row": "Baseline", "than": ["QuaRot"]}}
CLAIMS = [
    {
        "text": "Rotation costs something.",
        "section": "5.1",
        "mechanism": {"better": {"row": "Baseline", "than": ["QuaRot"]}},
    },
    {
        "text": HOSTILE,
        "section": "5.2",
        "experiment": {"cause": "Other models differ", "target": "quarot_table2", "check": FOUR_BITS},
        "mechanism": {"better": {"row": "QuaRot", "than": ["Baseline"]}},
    },
]
TABLES = {
    "paper": "quarot",
    "title": "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs",
    "tables": [
        {
            "id": "quarot_table1",
            "metrics": [{"kind": "perplexity", "corpus": "wikitext2"}],
            "columns": ["Llama-2-7B", "Llama-2-13B"],
            "claims": CLAIMS,
            "published": "published/small.csv",
            "figure": {"kind": "relative_increase", "caption": "Increase."},
            **COMMON,
        },
        {
            "id": "quarot_table2",
            "metrics": [{"kind": "zero_shot", "suite": "shipped", "corpus": "wikitext2"}],
            "columns": ["Llama-2-7B", {"name": "again", "slot": "Llama-2-7B"}],
            "claims": [],
            "published": "published/small.csv",
            "figure": {"kind": "tasks", "caption": "Tasks."},
            **COMMON,
        },
        {
            "id": "quarot_own",
            "metrics": [{"kind": "perplexity", "corpus": "wikitext2"}],
            "columns": ["Llama-2-13B"],
            "claims": [],
            **COMMON,
        },
    ],
}
PUBLISHED = """row,column,metric,value,unit
Baseline,Llama-2-7B,perplexity,5.47,ppl
QuaRot,Llama-2-7B,perplexity,8.372,ppl
Baseline,Llama-2-7B,piqa,79.11,%
"""
VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """The elements of a page, each as (tag, attributes), and whether every tag was closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, name: str) -> list[str]:
        """The values of an attribute, wherever it occurs."""
        return [values[name] or "" for _, values in self.elements if name in values]


def build(root: Path) -> Project:
    """A project in a folder whose three tables are rendered."""
    copy = Copy(root)
    copy.write("workflow/papers/quarot/published/small.csv", PUBLISHED)
    copy.set_tables(TABLES)
    loaded = load_project(root=root)
    for name, table in loaded.tables.items():
        render(loaded, name, table)
    return loaded


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with pytest.MonkeyPatch.context() as patch:
        checkpoints_by_name(patch)
        yield build(tmp_path_factory.mktemp("project"))


@pytest.fixture
def own_project(project: Project, tmp_path: Path) -> Project:
    """A project that a test may damage."""
    shutil.copytree(project.root, tmp_path / "copy")
    return load_project(root=tmp_path / "copy")


def render(project: Project, name: str, table: Any) -> None:
    """Run files, CSV, figure and a page of one table; QuaRot is worse than the baseline."""
    for cell in project.cells(name):
        for run in cell.runs:
            value = 40.0 + run.seed / 10 + (3 if (cell.row == "QuaRot") == (run.metric.kind == "perplexity") else 0)
            numbers = {quantity.name: value for quantity in quantities(run.metric)}
            record = {**circumstances(), "code_digest": "0123456789abcdef", "seconds": 1.5}
            write_result(project.results.run(run.key), RunResult(run, numbers, record, None))
    values, _ = tables.collect(project, table)
    write_frame(project.root / table_path(name), values.frame)
    if table.figure:
        figures.draw(project, table, values, project.root / figures.figure_path(name))
    write_text(project.root / f"reports/{name}.md", f"# {name}\n")


def write_pages(project: Project) -> None:
    for name, text in render_pages(project).items():
        write_text(project.root / "reports" / name, text)


def article(text: str, name: str) -> str:
    """One target's part of the page, with ordinary spaces."""
    return text[text.index(f'<article id="{name}"') :].partition("</article>")[0].replace("\u00a0", " ")


def test_the_page_is_well_formed_and_loads_nothing(project: Project) -> None:
    text = html.index(project)
    page = Page(text)
    assert page.open == []
    assert {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "base"} == set()
    assert "src" not in {name for _, attributes in page.elements for name in attributes}
    assert not re.search(r"https?:|@import", text)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")


def test_ids_of_different_figures_never_clash_and_all_references_resolve(project: Project) -> None:
    text = html.index(project)
    page = Page(text)
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    assert sum(tag == "svg" for tag, _ in page.elements) == 2
    references = [value[1:] for value in page.all("href") if value.startswith("#")] + re.findall(r"url\(#(.+?)\)", text)
    assert references
    assert set(references) <= set(ids)
    assert set(page.all("aria-labelledby")) <= set(ids)


def test_links_to_files_are_relative_and_lead_somewhere(project: Project) -> None:
    write_pages(project)
    links = [value for value in Page(html.index(project)).all("href") if not value.startswith("#")]
    assert {"quarot_table1.html", "../results/tables/quarot_table1.csv"} < set(links)
    assert not [link for link in links if link.endswith(".md")]
    assert all((project.root / "reports" / link).resolve().is_file() for link in links)


def test_a_report_is_a_page_with_its_figures_inline_and_links_to_other_pages(own_project: Project) -> None:
    text = (
        "# Title\n\nA caption with *italic*.\n\n![Increase.](figures/quarot_table1.svg)\n\n"
        "| a | b |\n| :-- | --: |\n| 1 | 2 |\n\n[other](quarot_table2.md), [file](../config/config.yaml), "
        "[run](missing.md)\n\n<details><summary>more</summary>\n\nholds ✅\n\n</details>\n"
    )
    write_text(own_project.root / "reports/quarot_table1.md", text)
    found = render_pages(own_project)
    assert set(found) == {"quarot_table1.html", "quarot_table2.html", "quarot_own.html"}
    shown = found["quarot_table1.html"]
    page = Page(shown)
    assert page.open == []
    assert {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe", "object", "base"} == set()
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # heat maps are pictures in an SVG
    assert page.all("href")[:2] == ["index.html#quarot_table1", "quarot_table1.md"]
    assert page.all("href")[-3:] == ["quarot_table2.html", "../config/config.yaml", "missing.md"]
    assert sum(tag == "svg" for tag, _ in page.elements) == 1
    assert "<title>Title</title>" in shown
    assert '<td style="text-align:right">2</td>' in shown
    assert "<p>holds ✓</p>" in shown


def test_names_and_ranges_in_cells_stay_on_one_line(own_project: Project) -> None:
    cells = "| Llama-2-13B, mean | a/long/path/to/rq-7b |\n| :-- | --: |\n| 4.06 to 4.09 | 2 & 3 |\n"
    text = f"# Title\n\nOf GPTQ-128G.\n\n{cells}"
    write_text(own_project.root / "reports/quarot_table1.md", text)
    shown = render_pages(own_project)["quarot_table1.html"]
    assert re.findall(r'<span class="whole">([^<]+)</span>', shown) == ["Llama-2-13B,", "4.06 to 4.09"]
    assert "a/long/path/to/rq-7b</th>" in shown
    assert "2 &amp; 3</td>" in shown


@pytest.mark.parametrize(
    ("section", "place"),
    [("5.1", "Section 5.1"), ("A.3", "Section A.3"), ("F", "Section F"), ("abstract", "Abstract"), ("-", "")],
)
def test_a_claim_names_its_place_in_the_paper(section: str, place: str) -> None:
    assert templates.place(section) == place


def test_numbers_stand_before_the_figure(project: Project) -> None:
    text = article(html.index(project), "quarot_table1")
    assert text.index("43.050") < text.index("<svg")


def test_a_paper_says_how_far_it_is(project: Project) -> None:
    text = html.index(project)
    claims = "Of 2 directions that they claim 1 agree, 1 disagree, and 0 are not tested here."
    assert text.count(f"2 of 2 of the papers' tables and figures are built. {claims}") == 2


def test_text_of_the_tables_is_escaped(project: Project) -> None:
    text = html.index(project)
    assert "onerror=alert(1)&gt; &amp; &quot;quotes&quot; of <code>code</code>" in text
    assert "<img" not in text
    assert text.count("<script") == text.count("</script>") == 1


#: Names and titles that would be elements, attributes, cells, code, links or pictures.
NAMES = ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b | c", "`code", "[x](y) ![z](../z.svg)")


@pytest.fixture(scope="module")
def hostile(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project whose names all are such."""
    first, second, third, fourth, fifth = NAMES
    everything = " ".join(NAMES)
    table = {
        **{key: value for key, value in TABLES["tables"][0].items() if key not in ("published", "claims")},
        "title": everything,
        "caption": everything,
        "notes": [everything],
        "label_columns": [fifth],
        "rows": [{**ROWS[0], "name": first, "labels": [second]}, {**ROWS[1], "name": second, "labels": [third]}],
        "columns": [{"name": third, "slot": "Llama-2-7B"}, {"name": fourth, "slot": "Llama-2-13B"}],
        "baseline": first,
        "figure": {"kind": "relative_increase", "caption": everything},
        "claims": [
            {
                "text": everything,
                "section": fifth,
                "quote": second,
                "mechanism": {"better": {"row": first, "than": [second]}},
            }
        ],
    }
    with pytest.MonkeyPatch.context() as patch:
        checkpoints_by_name(patch)
        copy = Copy(tmp_path_factory.mktemp("hostile"))
        copy.set_tables({"paper": "quarot", "title": everything, "tables": [table]})
        loaded = load_project(root=copy.root)
        render(loaded, "quarot_table1", loaded.table("quarot_table1"))
        write_text(loaded.root / "reports/quarot_table1.md", markdown_page(loaded, "quarot_table1"))
        yield loaded


@pytest.mark.parametrize("which", ["index", "page"])
def test_names_titles_and_captions_are_text_wherever_they_stand(hostile: Project, which: str) -> None:
    text = html.index(hostile) if which == "index" else render_pages(hostile)["quarot_table1.html"]
    page = Page(text)
    assert page.open == []
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == (1 if which == "index" else 0)
    assert not {"img", "iframe", "object"} & set(tags)
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&gt;&lt;img src=x onerror=alert(1)&gt;" in text
    assert tags.count("svg") == 1
    label = next(attributes["aria-label"] for tag, attributes in page.elements if tag == "svg")
    assert label == " ".join(NAMES)


def test_names_leave_the_cells_of_a_table_apart(hostile: Project) -> None:
    shown = render_pages(hostile)["quarot_table1.html"]
    table = shown[shown.rindex("<table>", 0, shown.index("<svg")) :].partition("</table>")[0]
    rows = [re.findall(r"<t[hd]\b", line) for line in table.split("<tr")[1:]]
    assert [len(cells) for cells in rows] == [4, 4, 4, 4]  # name, label, two columns; a rule below full precision
    assert "a &amp; b | c" in table


def test_ours_stand_beside_the_papers_with_as_many_decimals(project: Project) -> None:
    text = article(html.index(project), "quarot_table1")
    row = text[: text.index("8.372")].rpartition("<tr>")[2] + text[text.index("8.372") :].partition("</tr>")[0]
    assert re.findall(r"<td[^>]*>(.+?)</td>", row) == [
        "QuaRot",
        "4",
        "43.050 ± 0.071",
        "<em>8.372</em>",
        "43.050 ± 0.071",
    ]
    assert "here: small" in text
    assert "here: larger" in text


def test_a_card_is_the_first_screen_of_its_page(project: Project) -> None:
    text = article(html.index(project), "quarot_table1")
    assert 'data-claims="agrees disagrees"' in text
    assert "✓ agrees: Llama-2-7B: 40.00 against 43.05" in text
    assert "✗ disagrees: " in text
    assert "Why not: Other models differ (<code>quarot_table2</code>)." in text
    assert "Provenance" not in text


def test_every_target_is_there_once_with_its_status(project: Project) -> None:
    page = Page(html.index(project))
    targets = {values["id"]: values["data-status"] for _, values in page.elements if "data-target" in values}
    assert list(targets) == list(project.tables)
    assert [name for name, status in targets.items() if status == "computed"] == [
        "quarot_table1",
        "quarot_table2",
        "quarot_own",
    ]
    assert {values["data-paper"] for _, values in page.elements if "data-target" in values} == {"quarot"}


def test_without_its_script_the_page_hides_only_the_controls(project: Project) -> None:
    hidden = [values.get("id") for _, values in Page(html.index(project)).elements if "hidden" in values]
    assert hidden == ["filters", "nothing"]


def test_equal_files_give_an_equal_page(project: Project) -> None:
    assert html.index(project) == html.index(project)


def test_a_missing_run_file_costs_its_numbers_and_not_the_index(own_project: Project) -> None:
    for key in own_project.runs:
        (own_project.results.run(key)).unlink()
    assert "full report" in article(html.index(own_project), "quarot_table1")


def test_a_damaged_figure_is_named(own_project: Project, tmp_path: Path) -> None:
    path = own_project.root / figures.figure_path("quarot_table1")
    path.write_text("<svg")
    with pytest.raises(ResultError, match=r"quarot_table1\.svg is damaged"):
        html.index(own_project)
    with pytest.raises(ResultError, match="does not exist"):
        inline_svg(tmp_path / "none.svg", "x", "label")


def test_a_figure_keeps_its_drawing_and_loses_what_would_touch_the_page(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="9pt" height="9pt">'
        "<metadata>m</metadata><defs><style>*{color:red}</style><script>s()</script><path id='p' d='M0 0'/></defs>"
        "<g clip-path='url(#c)' style='fill: url(#c)'><use xlink:href='#p' x='1'/></g><clipPath id='c'/></svg>"
    )
    assert inline_svg(tmp_path / "a.svg", "t", 'say "it"') == (
        '<svg width="9pt" role="img" aria-label="say &quot;it&quot;"><defs><path id="t-p" d="M0 0"></path></defs>'
        '<g clip-path="url(#t-c)" style="fill: url(#t-c)"><use href="#t-p" x="1"></use></g>'
        '<clipPath id="t-c"></clipPath></svg>'
    )


def test_the_command_writes_both_indexes_and_the_gallery_takes_the_markdown(
    own_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_project.root)
    for command in ("index", "gallery"):
        outcome = CliRunner().invoke(report_app, [command])
        assert outcome.exit_code == 0, outcome.output
    assert (own_project.root / "reports/index.html").read_text() == html.index(own_project)
    assert (own_project.root / "reports/quarot_table1.html").exists()
    gallery = own_project.root / "docs/gallery"
    assert not list(gallery.glob("*.html"))
    assert "](index.html)" in (own_project.root / "reports/index.md").read_text()
    assert "](index.html)" not in (gallery / "index.md").read_text()

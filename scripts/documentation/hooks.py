"""What mkdocs calls while it builds the site (https://www.mkdocs.org/user-guide/configuration/#hooks)."""

import re
from typing import Any

from mkdocs.structure.files import File, Files

from rotquant.foundation.files import read_text
from scripts.documentation import methods, reference
from scripts.documentation.links import ROOT, for_python_markdown, notebook_page, outside_files, rewritten

#: Files that belong to the site although no page may link to them yet.
ROOTS = ("CONTRIBUTING.md", "config/README.md", "CHANGELOG.md")
#: Papers in the navigation of the gallery, by the short name with which reports begin.
PAPERS = {"quarot": "QuaRot", "spinquant": "SpinQuant", "prefixquant": "PrefixQuant", "rcp": "RCP"}


def _read(path: str) -> str:
    text = read_text(ROOT / path, "page")
    return notebook_page(text) if path.endswith(".ipynb") else text


def on_config(config: Any) -> Any:
    """Complete the navigation: methods, the reference's pages, and the gallery's reports by paper."""
    sections = {name: entry[name] for entry in config.nav for name in entry}
    sections["Methods"] += [{one.title: f"methods/{one.name}.md"} for one in methods.subjects()]
    modules = [{title: f"reference/{name}.md"} for name, title, *_ in reference.MODULES]
    commands = [{f"rotquant {name}": f"reference/{name}.md"} for name in reference.commands()]
    sections["Reference"][1:1] = [{"Modules": modules}, {"Commands": commands}]
    shipped = [{"Scoreboard": "gallery/shipped/index.md"}, *_reports("gallery/shipped")]
    sections["Gallery"] += [*_reports("gallery"), {"Models that ship": shipped}]
    return config


def _reports(folder: str) -> list[dict[str, Any]]:
    """The reports in a folder of docs/ by paper, as the navigation has them."""
    found: dict[str, list[Any]] = {name: [] for name in [*PAPERS.values(), "Others"]}
    for report in sorted((ROOT / "docs" / folder).glob("*.md"), key=lambda path: _number(path.stem)):
        if report.stem != "index":
            paper = PAPERS.get(report.stem.partition("_")[0], "Others")
            found[paper].append({_short(report.stem): f"{folder}/{report.name}"})
    return [{name: pages} for name, pages in found.items() if pages]


def _number(name: str) -> list[Any]:
    """A name's order: its words, with numbers as numbers."""
    return [part.zfill(4) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _short(name: str) -> str:
    """The words of a report in the navigation: `quarot_table1` is "Table 1"."""
    label = name.partition("_")[2]
    return re.sub(r"(\d+)$", r" \1", label).replace("_", " ").capitalize()


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the files of the project that pages link to."""
    made = methods.pages() | reference.pages()
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    own = {f.src_uri: f.content_string for f in files.documentation_pages()}
    own |= {"roots": "".join(f"[x](../{path})" for path in ROOTS)}
    for place, path in outside_files(own, _read).items():
        page = {"content": _read(path)} if place.endswith(".md") else {"abs_src_path": str(ROOT / path)}
        files.append(File.generated(config, place, **page))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site has them, and lists as its Markdown reads them.

    The search leaves reports out, whose numbers are most of all text: the scoreboard has their titles. Their tables
    are wide, so they have no second sidebar.
    """
    if page.file.src_uri.startswith("gallery/") and page.file.name != "index":
        page.meta |= {"search": {"exclude": True}, "hide": ["toc"]}
    return for_python_markdown(rewritten(page.file.src_uri, markdown))

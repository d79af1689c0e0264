"""Links of pages to files of the project outside of docs/: which of those become part of the site, and at which place.

Pages in docs/ are written for readers on a code host, where `../CONTRIBUTING.md` is a page. On the site such a file
becomes a page below `project/`, and any other file is copied there, so that no link leaves the site.
"""

import json
import posixpath
import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
#: Where on the site the files from outside of docs/ are.
OUTSIDE = "project"
#: A link of Markdown, without its text: target and anchor.
_LINK = re.compile(r"\]\(([^)\s#]*)(#[^)\s]*)?\)")
_DEAD = re.compile(r"\[([^\]]*)\]\((?:\.\./)+results/(?!bench/)[^)]*\)")


@cache
def tracked() -> frozenset[str]:
    """Paths of the files under version control, or of all where there is none (an unpacked archive)."""
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        return frozenset(found.stdout.splitlines())
    return frozenset(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file())


def source_of(place: str) -> str:
    """The project's path of a page of the site."""
    path = place.removeprefix(f"{OUTSIDE}/") if place.startswith(f"{OUTSIDE}/") else f"docs/{place}"
    notebook = f"{path.removesuffix('.md')}.ipynb"
    return notebook if notebook in tracked() else path


def place_of(path: str) -> str:
    """The place on the site of a file of the project; of a folder, that of its README."""
    if f"{path}/README.md" in tracked():
        path = f"{path}/README.md"
    if path == "README.md":
        return "index.md"  # the site's first page says what the README says
    path = f"{path.removesuffix('.ipynb')}.md" if path.endswith(".ipynb") else path
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def targets(place: str, text: str) -> Iterable[str]:
    """The project's paths that a page links to, those that are files or folders under version control."""
    for target, _ in _LINK.findall(text):
        if (path := _resolved(place, target)) is not None:
            yield path


def _resolved(place: str, target: str) -> str | None:
    """The project's path of a link's target; None where that is an address, an anchor, or not under version control."""
    if not target or "://" in target or target.startswith(("mailto:", "/")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source_of(place)), target))
    path = path.removeprefix("../")  # pages of the gallery that were copied by older code have one too many
    return path if path in tracked() or path in _folders() else None


@cache
def _folders() -> frozenset[str]:
    """All folders of files under version control."""
    return frozenset(str(folder) for one in tracked() for folder in PurePosixPath(one).parents if folder.name)


def outside_files(pages: dict[str, str], read: Callable[[str], str]) -> dict[str, str]:
    """The files from outside of docs/ that belong to the site, by their places: those that pages link to, and so on.

    Args:
        pages: text of the site's own pages by their places.
        read: text of a file of the project.
    """
    found: dict[str, str] = {}
    waiting = list(pages.items())
    while waiting:
        for path in targets(*waiting.pop()):
            place = place_of(path)
            path = source_of(place)
            if path.startswith("docs/") or place in found or path not in tracked():
                continue
            found[place] = path
            if place.endswith(".md"):
                waiting.append((place, read(path)))
    return found


def rewritten(place: str, text: str) -> str:
    """The text of a page with links as the site has them; a folder without README, and a result, become plain text."""
    text = _DEAD.sub(r"\1", text)

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        path = _resolved(place, target)
        if path is None:
            return match[0]
        to = place_of(path)
        if source_of(to) not in tracked() and to != "index.md":
            return words
        return f"[{words}]({posixpath.relpath(to, posixpath.dirname(place) or '.')}{anchor or ''})"

    return re.sub(r"\[([^\[\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)", link, text)


def notebook_page(text: str) -> str:
    """A notebook as a page: its words, and its code without outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)


def for_python_markdown(text: str) -> str:
    """Text for a code host as the site's Markdown reads it: nested lists by four spaces, Markdown inside of details."""
    text = text.replace("<details><summary>", '<details markdown="1"><summary>')
    return re.sub(r"^ {2,3}(?=[-*] )", "    ", text, flags=re.MULTILINE)

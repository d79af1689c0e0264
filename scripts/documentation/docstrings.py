"""Docstrings of this project as the site's reader of Google's style takes them."""

import re
from typing import Any

import griffe

#: The start of an entry, `name: what it is` or `name, other: ...`, at the margin of a docstring.
_ENTRY = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (?=\S)")


class Entries(griffe.Extension):
    """Makes lists of the entries by which docstrings of classes explain fields: else these are one paragraph."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of a module, class or function, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """A docstring whose entries at the margin are a list of Markdown, with their further lines indented."""
    lines: list[str] = []
    inside = False
    for line in text.split("\n"):
        if match := _ENTRY.match(line):
            if not inside:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in match[1].split(", "))
            lines.append(f"- {names}: {line[match.end() :]}")
            inside = True
        else:
            inside = inside and line.startswith("    ")
            lines.append(line)
    return "\n".join(lines)

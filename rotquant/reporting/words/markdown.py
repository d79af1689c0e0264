"""Tables of texts as GitHub-flavoured Markdown."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]], align: str) -> str:
    """A table; `align` has one letter per column, l or r."""
    rule = [":--" if letter == "l" else "--:" for letter in align]
    lines = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *rows]]
    return "\n".join(lines) + "\n"

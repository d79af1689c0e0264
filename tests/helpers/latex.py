"""What a table in LaTeX must be."""

import re


def check(text: str) -> None:
    """Environments and braces are balanced, and every line of a table has as many cells as it has columns."""
    open_ones: list[str] = []
    for begin, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if begin == "begin":
            open_ones.append(name)
        else:
            assert open_ones.pop() == name
    assert open_ones == []
    plain = re.sub(r"\\[\\{}$&]", "", text)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    for columns, body in re.findall(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        lines = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert len(lines) >= 2
        for line in lines:
            spans = [int(width) - 1 for width in re.findall(r"\\multicolumn\{(\d+)\}", line)]
            assert len(re.findall(r"(?<!\\)&", line)) + sum(spans) == len(columns) - 1

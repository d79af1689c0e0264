"""Names and ranges of numbers that a table's narrow column must not break."""

import re

from markupsafe import Markup, escape

#: "Llama-2-13B,", "GPTQ-128G"; "4.06 to 4.09". Longer ones, such as paths, may break.
_WHOLE = re.compile(r"(?<!\S)(?:[\w.]{1,10}(?:-[\w.,]{1,10})+|[\d.]+ to [\d.]+)(?!\S)")


def whole(text: str) -> Markup:
    """Escaped text of a cell, in which names with hyphens and ranges of numbers stay on one line."""
    return Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', str(escape(text))))

"""SVG figures as part of an HTML page: ids are made unique, and parts needed only in a file are left out."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from rotquant.foundation.errors import ResultError
from rotquant.foundation.files import check_regular

_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
#: Dropped elements: metadata has outside addresses; a style sheet would apply to the whole page.
_DROPPED = ("metadata", "style", "script", "title", "foreignObject")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def inline_svg(path: Path, prefix: str, label: str) -> str:
    """The figure of a file as an `<svg>` element for a page.

    Args:
        prefix: put before every id, so that two figures of a page never refer to each other's parts.
        label: text for screen readers instead of the drawing.

    Raises:
        ResultError: the file is missing or is not SVG.
    """
    check_regular(path)
    try:
        drawing = ElementTree.fromstring(path.read_bytes())
    except FileNotFoundError:
        raise ResultError(f"figure {path} does not exist.") from None
    except ElementTree.ParseError as error:
        raise ResultError(f"figure {path} is damaged ({error}); delete it and run again.") from None
    _drop(drawing)
    for element in drawing.iter():
        element.tag = element.tag.removeprefix(_SVG)
        element.attrib = {
            name.removeprefix(_XLINK): _renamed(name.removeprefix(_XLINK), value, prefix)
            for name, value in element.attrib.items()
            if not _acts(name.removeprefix(_XLINK), value)
        }
    for name in ("height", "version"):  # the height follows from the view box if the page narrows the width
        drawing.attrib.pop(name, None)
    drawing.attrib |= {"role": "img", "aria-label": label}
    return ElementTree.tostring(drawing, encoding="unicode", short_empty_elements=False)


def _drop(element: ElementTree.Element) -> None:
    for child in list(element):
        if child.tag in {_SVG + name for name in _DROPPED}:
            element.remove(child)
        else:
            _drop(child)


def _acts(name: str, value: str) -> bool:
    """Whether an attribute runs code, or links to anything but an embedded picture."""
    return name.startswith("on") or (name == "href" and not value.startswith(("#", "data:image/")))


def _renamed(name: str, value: str, prefix: str) -> str:
    """An attribute's value with the prefix in ids and in references to them."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    return _REFERENCE.sub(rf"url(#{prefix}-\1)", value)

"""Docstrings of this project as the site's reader of Google's style takes them."""

from typing import Any

import griffe

from scripts.documentation.words import with_lists


class Entries(griffe.Extension):
    """Makes lists of the entries by which docstrings of classes explain fields: else these are one paragraph."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of a module, class or function, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)

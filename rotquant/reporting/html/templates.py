"""Where the templates lie, and how they are read: all text is escaped, and a name that is not given is an error."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).parent


def environment() -> Environment:
    """The templates of this folder."""
    loader = FileSystemLoader(FOLDER)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)

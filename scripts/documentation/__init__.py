"""The documentation site's generated pages; `hooks` is what mkdocs calls, the other modules make pages as text."""

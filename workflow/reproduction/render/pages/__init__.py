"""Sections of a table's page, one module each; `reproduction.render.pages.runs` combines them."""

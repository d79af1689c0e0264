"""The sections of a table's page, one module each; `reproduction.render.pages.report` puts them together."""

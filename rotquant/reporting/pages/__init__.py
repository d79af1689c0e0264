"""The sections of a table's page, one module each; `rotquant.reporting.markdown` puts them together."""

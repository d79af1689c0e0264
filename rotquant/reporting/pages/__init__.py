"""The sections of a table's page, one module each; `rotquant.reporting.pages.report` puts them together."""

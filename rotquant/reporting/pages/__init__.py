"""The sections of a table's page, one module each; `rotquant.reporting.pages.page` puts them together."""

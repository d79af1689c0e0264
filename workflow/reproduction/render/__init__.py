"""Reports: one page model and its renderings, figures."""

"""Numbers, settings and tables in words."""

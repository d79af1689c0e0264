"""Figures of tables, one module per kind, in one style."""

"""Figures of tables, each of its kind, in one style."""

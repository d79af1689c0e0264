"""Checks of the papers' claims on our numbers, and the verdicts."""

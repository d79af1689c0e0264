"""Metrics that only the papers' figures or tables need, and the union of all metrics."""

"""What only a figure or table of the papers measures, and the union of all metrics."""

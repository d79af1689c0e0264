"""From result files to tables, claims, figures and pages. Nothing here computes a number of a method, or imports torch."""

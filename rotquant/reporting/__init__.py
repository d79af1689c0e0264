"""From result files to tables, claims, figures and pages. Nothing here computes a method's number or imports torch."""

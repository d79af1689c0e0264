"""What claims of the papers ask of our numbers, and the verdicts."""

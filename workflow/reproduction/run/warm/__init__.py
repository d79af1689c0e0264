"""A warm process: it imports once what commands need, and forks a child for each command of the workflow."""

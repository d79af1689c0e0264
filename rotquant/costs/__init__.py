"""Costs of quantizing a model before anything is computed: memory, time and disk space, and what each follows from.

Memory and disk space follow from the shapes of a model's parameters and from what the code holds and stores. Time
follows from recorded runs (`records.json`). Nothing here reads a weight.
"""

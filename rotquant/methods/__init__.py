"""The published methods, each a class in a module of its own (`rotquant.recipes.recipe.Method`), found by its name.

Every public module here is a method: a single file, or a package whose `__init__` imports no torch and whose other
modules have the mathematics and what acts. Nothing lists them. None has a quantizer of its own, but for quip, which
rounds to a lattice.
"""

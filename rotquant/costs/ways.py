"""How each method of a recipe works, which follows from the recipe alone. Imports no torch."""

from typing import Literal

from rotquant.recipes.recipe import Method, Recipe

#: How a method works, which decides what it holds in memory. `network`: runs the whole network on the device, and
#: learns through it. `training`: trains all parameters of a copy in float32, with the model as its teacher. `blocks`:
#: trains one decoder layer at a time on two streams of hidden states. `sites`: rounds one layer at a time by X^T X of
#: its inputs, site by site, and `layers` by those of all of its sites at once. `stream`: passes the text through one
#: layer at a time.
Way = Literal["network", "training", "blocks", "sites", "layers", "stream"]


def way_of(method: Method, recipe: Recipe) -> Way:
    """How a method works, by its roles and by whether it learns: one with learning rates and steps does."""
    budget = method.budget(recipe)
    learns = bool(budget.steps and budget.rates)
    if "rotations" in method.roles or (learns and "prefix" in method.roles):
        return "network"
    if learns and not method.calibrates and "transformation" in method.roles:
        return "training"
    if learns:
        return "blocks"
    sums = "rounding" in method.roles or method.inverts  # X^T X of each site
    return (method.reads or "sites") if sums else "stream"

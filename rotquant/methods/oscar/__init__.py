"""OSCAR as a method of a recipe: its settings and what they need; `covariances` has the mathematics."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rotquant.recipes.recipe import Method, Recipe, Role
from rotquant.recipes.schemes import Calibration, QuantizationScheme
from rotquant.recipes.transforms import Location, Transform

#: Names of the stored matrices, and where they act.
LOCATIONS: dict[str, Location] = {"keys": "queries_keys", "values": "values"}


class Oscar(Method):
    """OSCAR (Zhou et al. 2026): one rotation of a layer's keys and one of its values, from covariances on calibration
    text, which act in the KV cache alone.

    First and recent tokens stay in full precision by `kept_first` and `kept_recent` of the recipe's keys and values.
    """

    name: ClassVar[str] = "oscar"
    actions: ClassVar[str] = "rotquant.methods.oscar.covariances"
    title: ClassVar[str] = "OSCAR"
    source: ClassVar[str] = "Zhou et al. 2026, OSCAR: query and score-weighted value covariance; its published code"
    roles: ClassVar[frozenset[Role]] = frozenset({"transformation"})
    acts_at_run_time: ClassVar[bool] = True
    calibrates: ClassVar[bool] = True

    hadamard: bool = True
    """Whether a Hadamard matrix follows the eigenvectors."""

    @property
    def acts_beyond_quantizers(self) -> bool:
        """Whether more than quantizers acts at run time: no, what leaves the cache is turned back."""
        return False

    def check(self, recipe: Recipe) -> None:
        """Keys or values are quantized by this project's rule, and keys have no other transform."""
        cache = [scheme for scheme in (recipe.keys, recipe.values) if scheme is not None]
        if not cache or any(scheme.rule != "own" or not scheme.dynamic for scheme in cache):
            raise ValueError("oscar turns quantized keys and values: it needs these sections, dynamic and of rule own")
        if recipe.rotation is not None and recipe.rotation.keys:
            raise ValueError("oscar turns keys itself: set rotation.keys to false")

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """Rotations of keys after RoPE and of values, in the cache."""
        return tuple(
            Transform(name=self.name, kind="orthogonal", location=at, online=True, origin="learned", tensors=(name,))
            for name, at in LOCATIONS.items()
        )

    @classmethod
    def presets(cls) -> Mapping[str, Callable[[], Recipe]]:
        """With 2-bit keys and values alone."""
        return {"oscar": oscar}


def oscar() -> Recipe:
    """OSCAR's KV cache in 2 bits and nothing else: clipped to 0.96 and 0.92 of their ranges, the first 64 and the last
    256 tokens in full precision."""
    cache: dict[str, Any] = {"bits": 2, "symmetric": False, "zero_point": "exact", "granularity": "head"}
    cache |= {"kept_first": 64, "kept_recent": 256}
    keys, values = (QuantizationScheme(**cache, clip_ratio=clip) for clip in (0.96, 0.92))
    return Recipe(methods={"oscar": Oscar()}, keys=keys, values=values, calibration=Calibration())

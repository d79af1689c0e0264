"""Records of learned rotations."""

from typing import Any

from reproduction.identity.run import signed
from tests.helpers.circumstances import circumstances

LEARNED = {"name": "Learned", "method": "spinquant-easy", "recipe": {"methods": {"gptq": None}}}


def learned_record(run: Any, loss: float = 3.0) -> dict[str, Any]:
    settings = run.recipe.methods["spinquant"].model_dump(mode="json")
    made = {
        **circumstances(),
        "code_digest": "0123456789abcdef",
        "checkpoint": run.checkpoint,
        "checkpoint_digest": run.checkpoint_digest,
        "digest": "feed",
        "seed": run.seed,
        "learning": settings,
        "first": {"loss": 5.0},
        "last": {"loss": loss},
        "seconds": 30.0,
    }
    return signed(made, run.rotation_identity())

"""What layers of some families have and Llama's have not: words that a model's description and a method share."""

from typing import Literal

Trait = Literal["head_norms", "experts", "post_norms", "bare_inputs", "offset_gains", "capped_logits"]

#: Each trait as the end of a sentence, "layers have ...".
TRAITS: dict[Trait, str] = {
    "head_norms": "norms of queries and keys",
    "experts": "experts",
    "post_norms": "norms after attention and MLP",
    "bare_inputs": "no norms before attention and MLP",
    "offset_gains": "norms that multiply by 1 + weight",
    "capped_logits": "a cap on the logits",
}

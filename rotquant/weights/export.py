"""A quantized model as an ordinary checkpoint: dequantized weights under their Hugging Face names, for any runtime.

What SpinQuant-easy is for (Sec. 4.2): rotated, quantized weights take the place of the original ones and the forward
pass stays as it is. Recipes with transforms at run time, their rotations' or a method's, have no such form. Quantizers
of activations and KV cache are the runtime's business and not in the folder.
"""

from pathlib import Path

import torch

from rotquant.foundation.errors import RecipeError
from rotquant.foundation.files import atomic_directory, check_output_folder, folder_size
from rotquant.foundation.progress import task
from rotquant.models.checkpoints import quiet_transformers
from rotquant.models.shards import LARGEST_SHARD
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import ROTATION_FIELDS
from rotquant.recipes.transforms import at
from rotquant.weights.storage import load_quantized, read_manifest


@task("exporting")
def export_plain(source: str | Path, output: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Args:
        source: a folder that `rotquant quantize` wrote.
        output: a folder that does not exist or is empty.
        dtype: of the weights; default the model's own, in which they are exact.

    Raises:
        RecipeError: the recipe has transforms at run time, or a method of it acts there on more than quantizers.
        ResultError: the output folder holds something, or the source is no quantized model.
        CheckpointError: the source is damaged.
    """
    output = Path(output)
    check_output_folder(output, needed=folder_size(source, "*.safetensors"))
    check_exportable(read_manifest(source).recipe)
    model, tokenizer, _ = load_quantized(source, "cpu", dtype)
    with atomic_directory(output) as temporary, quiet_transformers():
        model.save_pretrained(temporary, max_shard_size=LARGEST_SHARD)
        tokenizer.save_pretrained(temporary)


def check_exportable(recipe: Recipe) -> None:
    """Raise `RecipeError` where the weights are of no use without transforms at run time.

    R3 may stay away: it turns queries and keys alike, so that only the error of a quantized cache depends on it.
    """
    online = [ROTATION_FIELDS[one.name] for one in at(recipe.transforms, "across_heads", "mlp_output", online=True)]
    if online:
        raise RecipeError(
            f"the weights undo transforms at run time (rotation.{', rotation.'.join(online)}), which an ordinary "
            "checkpoint cannot hold: quantize with the method spinquant-easy, or with these set to false."
        )
    for method in recipe.methods.values():
        if method.acts_beyond_quantizers:
            what = "puts a prefix before every text" if "prefix" in method.roles else "transforms what layers read"
            raise RecipeError(
                f"the method {method.name} {what} while the model runs, which an ordinary checkpoint cannot hold: "
                "evaluate the quantized folder itself, or quantize without this method."
            )

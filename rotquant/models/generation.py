"""How a model writes: its own generation settings, where a text ends, and the one rule by which models are compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation.errors import CheckpointError
from rotquant.models.checkpoints import first_line, quiet_transformers
from rotquant.models.companions import GENERATION

if TYPE_CHECKING:
    from transformers import GenerationConfig


def generation_config(folder: str | Path) -> "GenerationConfig | None":
    """The settings in a folder's generation_config.json; None where there is no such file, or it is no JSON.

    Raises:
        CheckpointError: transformers accepts no such settings.
    """
    from transformers import GenerationConfig

    try:
        with quiet_transformers():
            return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # no file, or no JSON: transformers takes those of config.json in both cases
        return None
    except Exception as error:  # transformers validates fields by several exceptions
        raise CheckpointError(f"{Path(folder) / GENERATION} is damaged: {first_line(error)}.") from None


def write_generation_config(folder: Path, settings: "GenerationConfig") -> None:
    """Write settings that a checkpoint has in no file of their own.

    As they are: transformers' `save_pretrained` refuses what it loads, such as a temperature without sampling.
    """
    settings.to_json_file(folder / GENERATION, use_diff=True, keys_to_pop=["compile_config"])


def end_tokens(settings: "GenerationConfig | None", tokenizer: Any) -> tuple[int, ...]:
    """The tokens at which a text ends: those of the generation settings, one or a list, and the tokenizer's EOS."""
    named = getattr(settings, "eos_token_id", None)
    ids = [*(named if isinstance(named, list | tuple) else [named]), getattr(tokenizer, "eos_token_id", None)]
    return tuple(sorted({one for one in ids if isinstance(one, int)}))


@contextmanager
def greedy(model: Any, tokenizer: Any, tokens: int, pad: int) -> Iterator[tuple[int, ...]]:
    """While open, `model.generate()` follows the rule by which models are compared; yields the tokens that end a text.

    The likeliest token each time, without any penalty or ban, at most `tokens` of them, to the first of `end_tokens`.
    The model's own settings, which transformers would mix in, are set aside: two models of one checkpoint then differ
    by their networks alone.

    Args:
        pad: the token that fills up texts that have ended.
    """
    from transformers import GenerationConfig

    own = getattr(model, "generation_config", None)
    ends = end_tokens(own, tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, eos_token_id=list(ends) or None, pad_token_id=pad
    )
    try:
        yield ends
    finally:
        model.generation_config = own

"""Attention masks of a whole model whose passes are recorded as a CUDA graph, and which models can be recorded.

transformers asks whether a stream is being recorded. Then it makes masks where attention has none otherwise, and torch
computes attention with other kernels, whose results differ. So layers get the masks of a pass that nobody records.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rotquant.models.architectures import architecture_of, config_of, decoder_layers


@contextmanager
def kept_masks(*models: nn.Module) -> Iterator[None]:
    """While open, decoder layers of models get the mask that they got first for texts of the same shape.

    Texts have no padding and no cache, so that their mask follows from their shape [batch, tokens].
    """
    with ExitStack() as stack:
        for layer in (layer for model in models for layer in decoder_layers(model)):
            hook = layer.register_forward_pre_hook(partial(_keep, {}), with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _keep(
    masks: dict[torch.Size, Tensor | None], _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    mask = masks.setdefault(args[0].shape[:2], kwargs.get("attention_mask"))
    return args, {**kwargs, "attention_mask": mask}


def recordable(model: nn.Module) -> bool:
    """Whether no number of its tensors decides what a model does next, and its masks need nothing of the host.

    How many tokens an expert sees decides what runs, and so do positions where RoPE follows the text's length. Masks of
    a family's own attention function are made on the host.
    """
    config, experts = config_of(model), "experts" in architecture_of(model).traits
    longer = config.rope_parameters.get("rope_type") in ("dynamic", "longrope")
    return not (experts or longer) and config._attn_implementation == "sdpa"

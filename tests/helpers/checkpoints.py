"""Small checkpoints with tokenizers."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rotquant.models.architectures import decoder_layers
from rotquant.models.checkpoints import load_checkpoint
from tests.helpers.models import VOCABULARY, tiny_model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer without merges, of GPT-2's split."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 3]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + place for place, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def save_words(file: Path, count: int) -> Path:
    """A text of random words that `tiny_tokenizer` knows, one a line."""
    words = random.Random(0).choices([f"w{i}" for i in range(3, VOCABULARY)], k=count)
    file.write_text("".join(f"{word}\n" for word in words))
    return file


def save_tiny(folder: Path) -> Path:
    """A tiny random Llama and its tokenizer as a checkpoint."""
    tiny_model(dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def with_few_layers(folder: Path, layers: int, place: Path) -> Path:
    """A copy of a shipped checkpoint, in bfloat16 as these are, with its first decoder layers alone."""
    model, tokenizer = load_checkpoint(folder, torch.bfloat16)
    del decoder_layers(model)[layers:]
    if getattr(model.config, "layer_types", None):  # Qwen-2 has them
        del model.config.layer_types[layers:]
    model.config.num_hidden_layers = layers
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place

"""Small checkpoints with tokenizers."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.models import VOCABULARY, tiny_model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )


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

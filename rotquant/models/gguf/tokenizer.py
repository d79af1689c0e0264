"""The tokenizer of a GGUF file: its tokens, scores, merges and kinds of tokens as one of transformers.

A file's `llama` tokenizer is SentencePiece's BPE: of neighbours that make a token, those of the best score are merged
first. `gpt2` is byte-level BPE, with merges of its own. transformers 5.17 makes a unigram model of the former for
Gemma, which splits words into letters, and leaves BOS out. torch is not loaded before a tokenizer is made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rotquant.foundation.errors import CheckpointError
from rotquant.models.gguf.header import Header

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase

#: gguf's `TokenType`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
#: SentencePiece's letter for a space.
_SPACE = "\u2581"
#: Texts by which llama.cpp knows tokens that end a text, where a file does not name them.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")
#: Special tokens of Phi-3 after which spaces stay.
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")


# How byte-level BPE tokenizers split text into words. GGUF says no normalization: what a family's own does is here.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_APOSTROPHES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASES = (
    r"[^\r\n\p{L}\p{N}]?" + _UPPER + "*" + _LOWER + r"+{0}|[^\r\n\p{L}\p{N}]?" + _UPPER + "+" + _LOWER + r"*{0}|{1}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class WordRules:
    """Rules of a kind of tokenizer.

    pattern: the regular expression of words; "" is GPT-2's. digits: whether each digit is a word, before that.
    whole_words: whether a word that is a token is not put together from merges.
    bos: whether a text begins with BOS where the file does not say; None where the models' own tokenizers have no BOS,
    though configurations, hence files, name one. nfc: whether text is normalized to NFC.
    """

    pattern: str = ""
    digits: bool = False
    whole_words: bool = False
    bos: bool | None = False
    nfc: bool = False


_LLAMA3 = WordRules(_WORDS % r"\p{N}{1,3}", whole_words=True, bos=True)

#: Rules by llama.cpp's names.
WORDS: dict[str, WordRules] = {
    "gpt-2": WordRules(),
    "smollm": WordRules(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": WordRules(_WORDS % r"\p{N}", bos=None, nfc=True),
    "deepseek-r1-qwen": WordRules(_WORDS % r"\p{N}"),
    "dbrx": WordRules(_WORDS % r"\p{N}{1,3}"),
    "gpt-4o": WordRules(_CASES.replace("{0}", _APOSTROPHES).replace("{1}", r"\p{N}{1,3}")),
    "tekken": WordRules(_CASES.replace("{0}", "").replace("{1}", r"\p{N}"), whole_words=True, bos=True),
}


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of its tokens.

    tokens, kinds: by id. scores: of SentencePiece. merges: pairs of byte-level BPE. ids: of special tokens, by name.
    add_bos, add_eos: whether the tokenizer puts them around a text. space: whether a text begins with a space.
    words: of byte-level BPE; None of SentencePiece. templates: of chats, by name, "" the usual one.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    templates: Mapping[str, str]
    scores: Sequence[float] = ()
    merges: Sequence[tuple[str, str]] = ()
    words: WordRules | None = None
    space: bool = False
    trims_after_special: bool = False

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids of the tokens that end a text, EOS first."""
        known = [place for text in _ENDS for place, token in enumerate(self.tokens) if token == text]
        known = [place for place in known if self.kinds[place] in (CONTROL, USER_DEFINED)]
        named = [self.ids[name] for name in ("eos", "eot", "eom") if name in self.ids]
        return tuple(dict.fromkeys([*named, *known]))

    def text_of(self, name: str) -> str | None:
        """A special token's text."""
        return self.tokens[self.ids[name]] if name in self.ids else None


def vocabulary_of(header: Header) -> Vocabulary:
    """A file's tokens, checked.

    Raises:
        CheckpointError: it has no tokenizer, one of another kind, or lists that do not fit each other.
    """
    get = _Fields(header)
    kind = get("model", str)
    if kind not in ("llama", "gpt2"):
        raise CheckpointError(
            f"{header.path} has a tokenizer of kind {kind!r}, and llama (SentencePiece) and gpt2 (byte-level BPE) are "
            "read."
        )
    tokens, kinds = get("tokens", list), get("token_type", list)
    twice = len(tokens) - len(set(tokens))
    if twice or len(kinds) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{header.path}: its {len(tokens)} tokens and their kinds do not fit, or are not unique.")
    names = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
    ids = {own: get(f"{theirs}_token_id", int, None) for own, theirs in names.items()}
    ids = {name: place for name, place in ids.items() if place is not None}
    if wrong := [place for place in ids.values() if not 0 <= place < len(tokens)]:
        raise CheckpointError(f"{header.path} names the token {wrong[0]} of {len(tokens)}.")
    shared = {
        "tokens": tokens,
        "kinds": kinds,
        "ids": ids,
        "add_eos": get("add_eos_token", bool, False),
        "templates": _templates(header),
    }
    if kind == "llama":
        scores = get("scores", list)
        if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
            raise CheckpointError(f"{header.path} has no score for each of its {len(tokens)} tokens.")
        return Vocabulary(
            **shared,
            add_bos=get("add_bos_token", bool, True),
            scores=scores,
            space=get("add_space_prefix", bool, True),
            trims_after_special=header.fields.get("general.architecture") == "phi3",
        )
    split = get("pre", str)
    if split not in WORDS:
        raise CheckpointError(
            f"{header.path} splits text into words by llama.cpp's rules {split!r}, and those that are known here are "
            f"{', '.join(WORDS)}."
        )
    words, known = WORDS[split], set(tokens)
    merges = [(first, second) for first, _, second in (str(one).partition(" ") for one in get("merges", list))]
    if not all({first, second, first + second} <= known for first, second in merges):
        raise CheckpointError(f"{header.path} has merges of what are no tokens of it.")
    return Vocabulary(**shared, add_bos=get("add_bos_token", bool, bool(words.bos)), merges=merges, words=words)


class _Fields:
    """The tokenizer's settings, each with its type."""

    def __init__(self, header: Header) -> None:
        self.header = header

    def __call__(self, name: str, kind: type, *usual: Any) -> Any:
        found = self.header.fields.get(f"tokenizer.ggml.{name}", *(usual or (None,)))
        if isinstance(found, kind) or (usual and found is usual[0]):
            return found
        what = "lacks" if found is None else "has something else in"
        raise CheckpointError(f"{self.header.path} {what} tokenizer.ggml.{name}, without which no text is read.")


def _templates(header: Header) -> dict[str, str]:
    """Chat templates by name, "" the usual one."""
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key).removeprefix("."): text for name, text in header.fields.items() if key in name}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def tokenizer_of(vocabulary: Vocabulary, longest: int) -> "PreTrainedTokenizerBase":
    """The tokenizer.

    Args:
        longest: tokens of a text, for `model_max_length`.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    backend = _sentencepiece(vocabulary) if vocabulary.words is None else _byte_level(vocabulary, vocabulary.words)
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token:
            trims = vocabulary.trims_after_special and token not in _PHI3_KEEPS_SPACES
            added.append(AddedToken(token, normalized=False, special=kind != USER_DEFINED, rstrip=trims))
    backend.add_tokens(added)
    names = {f"{name}_token": vocabulary.text_of(name) for name in ("bos", "eos", "unk", "pad")}
    templates = dict(vocabulary.templates)
    unused = not (vocabulary.add_bos or any("bos_token" in text for text in templates.values()))
    if unused and vocabulary.words is not None and vocabulary.words.bos is None:
        names["bos_token"] = None
    if "" in templates:
        templates["default"] = templates.pop("")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=vocabulary.add_bos and names["bos_token"] is not None,
        add_eos_token=vocabulary.add_eos,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
        chat_template=templates["default"] if len(templates) == 1 and "default" in templates else templates or None,
        **{name: text for name, text in names.items() if text is not None},
    )


def _sentencepiece(vocabulary: Vocabulary) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {token: place for place, token in enumerate(vocabulary.tokens)}
    merged = {token: place for token, place in ids.items() if vocabulary.kinds[place] in (NORMAL, USER_DEFINED, UNUSED)}
    pairs = sorted(
        (-vocabulary.scores[place], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token, place in merged.items()
        for cut in range(1, len(token))
        if token[:cut] in merged and token[cut:] in merged
    )
    model = models.BPE(
        ids,
        [(first, second) for *_, first, second in pairs],
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.text_of("unk"),
    )
    found = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    found.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if vocabulary.space else spaces
    written = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    found.decoder = decoders.Sequence([*written, decoders.Strip(" ", 1, 0)] if vocabulary.space else written)
    return found


def _byte_level(vocabulary: Vocabulary, words: WordRules) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {
        token: place
        for place, token in enumerate(vocabulary.tokens)
        if not (vocabulary.kinds[place] == UNUSED and token == f"[PAD{place}]")  # rows of the embedding without a text
    }
    found = Tokenizer(models.BPE(ids, list(vocabulary.merges), ignore_merges=words.whole_words))
    found.normalizer = normalizers.NFC() if words.nfc else None
    found.pre_tokenizer = _split(words)
    found.decoder = decoders.ByteLevel()
    return found


def _split(words: WordRules) -> "PreTokenizer":
    """What splits text into words by rules, and words into bytes."""
    from tokenizers import Regex, pre_tokenizers

    splits: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.digits else []
    if words.pattern:
        splits.append(pre_tokenizers.Split(Regex(words.pattern), "isolated"))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words.pattern))
    return pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0]


def rules_of(pre_tokenizer: Any) -> str | None:
    """llama.cpp's name of the rules by which a tokenizer splits text, from its description; None of others."""
    plain = {name: _described(json.loads(_split(rules).__getstate__())) for name, rules in WORDS.items()}
    return next((name for name, parts in plain.items() if parts == _described(pre_tokenizer)), None)


def _described(pre_tokenizer: Any) -> list[Any]:
    """The parts of a description, without what decides offsets alone."""
    parts = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    return [{key: value for key, value in part.items() if key != "trim_offsets"} for part in parts]

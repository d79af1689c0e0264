"""How byte-level BPE tokenizers split text into words, by llama.cpp's names (`tokenizer.ggml.pre`).

The regular expressions are those of the models' own tokenizers. GGUF says no normalization, so what a family's own
tokenizer does (NFC of Qwen2) is said here.
"""

from dataclasses import dataclass

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
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
    "gpt-4o": WordRules(_CASES.replace("{0}", _ENDS).replace("{1}", r"\p{N}{1,3}")),
    "tekken": WordRules(_CASES.replace("{0}", "").replace("{1}", r"\p{N}"), whole_words=True, bos=True),
}

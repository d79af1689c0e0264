"""Number and content of the tokens that are stored in front of every text (PrefixQuant Table 1)."""

from collections.abc import Callable, Sequence

#: PrefixQuant's sign for the BOS token, whatever a tokenizer writes for it.
BOS = "[BOS]"


def prefix_tokens(
    ids: Sequence[int], bos: int | None, decode: Callable[[int], str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Count the tokens of a prefix, and format them as in PrefixQuant's Table 1.

    Args:
        ids: the tokens, in their order; none where a model has no outlier token.
        bos: the id of the BOS token; None where the model has none.
        decode: the text of a token id.

    Returns:
        Metrics: `tokens`, their number. Texts: `content`, the tokens without separators (`content_of`).
    """
    return {"tokens": float(len(ids))}, {"content": content_of(ids, bos, decode)}


def content_of(ids: Sequence[int], bos: int | None, decode: Callable[[int], str]) -> str:
    r"""The tokens on one line as in PrefixQuant's Table 1: `[BOS]`, `\n` for a line end and `_` for a space."""
    return "".join(BOS if token == bos else _visible(decode(token)) for token in ids)


def _visible(text: str) -> str:
    """A text with every character made visible."""
    return "".join(repr(one)[1:-1] if not one.isprintable() else "_" if one == " " else one for one in text)

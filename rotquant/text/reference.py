"""The Python language reference as interpreters carry it for `help()`: a second text that every installation has.

About 460,000 characters of English prose and grammar, another kind of text than documentation strings. It follows the
interpreter's version, so it serves for calibration alone and is never evaluated on.
"""

from rotquant.foundation.errors import CorpusError
from rotquant.recipes.corpus import Split


def reference_rows(split: Split) -> list[str]:
    """The topics of the reference in the order of their names, all of them as the train split.

    Raises:
        CorpusError: another split, or an interpreter without the reference.
    """
    if split != "train":
        raise CorpusError(f"The reference corpus serves for calibration: it has no {split} split.")
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise CorpusError("This Python carries no reference (pydoc_data.topics); name another corpus.") from None
    return [topics[name].strip() for name in sorted(topics)]

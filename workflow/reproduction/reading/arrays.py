"""Arrays of numbers in files of numpy's format, read without pickles and refused in one way."""

import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

from rotquant.foundation.files import check_regular

if TYPE_CHECKING:
    from numpy import ndarray


def read_array(path: Path, dtype: str) -> "ndarray":
    """The one-dimensional array of a .npy file.

    Raises:
        ValueError: it is damaged, or of another type or shape: numpy parses the file's head as Python.
        OSError: it cannot be read.
        ResultError: it is no regular file.
    """
    import numpy as np

    check_regular(path)
    try:
        found = np.load(path, allow_pickle=False)
    except (EOFError, SyntaxError, tokenize.TokenError, TypeError, LookupError, MemoryError, RecursionError) as error:
        raise ValueError(f"its head cannot be read ({type(error).__name__})") from None
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype != dtype:
        raise ValueError(f"it holds no list of {dtype}")
    return found

"""Where and when a result of a test was computed."""

import functools
from typing import Any

from rotquant.foundation.environment import environment


@functools.cache
def circumstances() -> dict[str, Any]:
    """The environment, found out once: it asks git."""
    return environment()

"""Benchmarks at the papers' real layer shapes: time and memory of a method, independent of the weights.

The arguments of a benchmark are validated data in the `__init__` of the package that has its function, so that tables
are read, checked and rendered without torch. A combination that cannot be measured is refused there.
"""

from typing import Annotated

from pydantic import Field

Size = Annotated[int, Field(gt=0)]

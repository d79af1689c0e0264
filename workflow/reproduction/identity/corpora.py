"""Recorded content hashes of the corpora that are read from installed packages, whose text depends on the version.

A report compares the hash of the text that was read with the hash recorded for the pinned packages.
"""

import json
from pathlib import Path

from rotquant.recipes.corpus import INSTALLED, CorpusSpec

EXPECTED_HASHES = Path(__file__).parents[2] / "resources" / "models" / "corpus.json"


def expected_hashes(spec: CorpusSpec) -> dict[str, str]:
    """The recorded content hashes of a corpus from installed packages, by portion; empty for other corpora."""
    if spec.source not in INSTALLED or not EXPECTED_HASHES.is_file():
        return {}
    return json.loads(EXPECTED_HASHES.read_text(encoding="utf-8")).get(spec.source, {}).get("sha256", {})

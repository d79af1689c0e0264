"""The recorded content hashes of the corpora that are read from installed packages, which follow their versions.

A report compares the hash of the text that was read with the recorded one, of the pinned packages.
"""

import json
from pathlib import Path

from rotquant.recipes.corpus import INSTALLED, CorpusSpec

EXPECTED_HASHES = Path(__file__).parents[2] / "resources" / "models" / "corpus.json"


def expected_hashes(spec: CorpusSpec) -> dict[str, str]:
    """The recorded content hashes of a corpus that follows installed packages, by portion; none of any other."""
    if spec.source not in INSTALLED or not EXPECTED_HASHES.is_file():
        return {}
    return json.loads(EXPECTED_HASHES.read_text(encoding="utf-8")).get(spec.source, {}).get("sha256", {})

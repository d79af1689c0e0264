"""Folders of models changed as somebody would who wants their digests to fit: for tests of what comes after these."""

import json
from pathlib import Path

from rotquant.models.integrity import seal


def reseal(manifest: Path, **changes: object) -> None:
    """Change a manifest, and make its digests those of the files that are beside it now."""
    content = json.loads(manifest.read_text()) | changes
    content.pop("digest", None)
    manifest.write_text(json.dumps(seal(manifest, content)))

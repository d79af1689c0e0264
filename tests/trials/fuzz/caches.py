"""Formats of what is kept, in the user's cache or in the project, so that it is not made twice."""

import hashlib
from pathlib import Path

from reproduction.corpora import Corpus
from reproduction.corpora.packages import cached
from reproduction.identity.syntax import read_module, rules
from reproduction.planning.fits import KnownFits, read_fits
from reproduction.run.stages.text import TOKENS, token_ids
from reproduction.tables.fitting import Fitting, model_of
from rotquant.foundation.contents import content_digest, stamp
from rotquant.foundation.files import canonical_json, short_hash
from rotquant.recipes.presets import preset
from tests.helpers.checkpoints import tiny_tokenizer
from tests.trials.fuzz.formats import Format, content_of

KEPT = "kept"
SOURCE = b"import math as m\n\nA = 'kernel.cu', m\n"
SYNTAX = b'[[["0123", ["A"], ["m"], [], ["kernel.cu"], false, []]], [["m", "math", "math"]]]'
ADAPTED = Fitting(recipe=preset("quarot"), sentence="adapted").model_dump(mode="json")
SHIPPED = "workflow/resources/models/rq-7b"
TEXT = " ".join(f"w{number}" for number in range(3, 60))


def formats(root: Path) -> list[Format]:
    """Each cache with a file that is found there."""
    return [
        Format("digests of contents", {KEPT: b"[]\n" + b"0" * 64}, {KEPT: "lines"}, _contents),
        Format("digests of syntax", {KEPT: SYNTAX}, {KEPT: "json"}, _syntax),
        Format("fits of recipes", {KEPT: _known_fits(root)}, {KEPT: "json"}, _fits),
        Format(
            "kept corpora",
            {"corpora/kept.json": b'["row", "other"]'},
            {"corpora/kept.json": "json"},
            _corpora,
            rewritten=True,
        ),
        _tokens(root),
    ]


def _place(path: Path, folder: Path) -> None:
    """Put the case's file where a cache has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    kept_file = folder / KEPT
    if kept_file.is_file() and kept_file.stat().st_size < 1 << 22:
        path.write_bytes(kept_file.read_bytes())


def _cache(name: str) -> Path:
    from rotquant.foundation.files import cache_folder

    return cache_folder(name)


def _contents(folder: Path) -> None:
    """The digest of a file that is large enough for it to be kept; what is kept names the file as it is."""
    large = folder / "large"
    large.write_bytes(bytes(1_000_001))
    place = _cache("contents") / short_hash(str(large.resolve()), 32)
    _place(place, folder)
    if place.is_file():
        told = canonical_json([str(large.resolve()), stamp(large)]).encode()
        place.write_bytes(place.read_bytes().replace(b"[]", told, 1))
    content_digest(large)


def _syntax(folder: Path) -> None:
    source = folder / "module.py"
    source.write_bytes(SOURCE)
    _place(_cache("syntax") / hashlib.sha256(SOURCE + rules()).hexdigest(), folder)
    read_module.__wrapped__(source)


def _known_fits(root: Path) -> bytes:
    known = KnownFits(root)
    model = model_of(SHIPPED, "0123")
    assert model is not None
    known.write({"4567": None, "89ab": Fitting.model_validate(ADAPTED)}, {"0123": model})
    (file,) = root.glob("results/plans/*.fits")
    return file.read_bytes()


def _fits(folder: Path) -> None:
    known = read_fits(folder / KEPT)
    for one in known.fits.values():
        repr(one and (one.sentence, one.recipe))
    for architecture, limits in known.models.values():
        repr((architecture.linears, limits.length()))


def _corpora(folder: Path) -> None:
    cache = folder / "corpora"
    for path in [*cache.iterdir()]:
        from reproduction.corpora.packages import _fingerprint

        path.rename(cache / f"docstrings-test-{_fingerprint('test', (1,))}.json")
    for row in cached("docstrings", "test", cache, (1,), lambda: ["made again"]):
        len(row)


def _tokens(root: Path) -> Format:
    import os

    files = {"text.test.txt": TEXT.encode()}
    place = root / "tokens"
    place.mkdir()
    (place / "text.test.txt").write_bytes(files["text.test.txt"])
    earlier = Path.cwd()
    os.chdir(place)
    _ids(place)
    os.chdir(earlier)
    (name,) = content_of(place, f"{TOKENS}/*.npy")
    return Format("texts as tokens", content_of(place), {name: "npy"}, _ids, rewritten=True)


def _ids(folder: Path) -> None:
    spec = Corpus(name="text", source="local", path="text.test.txt")
    tokens, _ = token_ids(spec, "test", tiny_tokenizer())
    assert tokens.ids.ndim == 1

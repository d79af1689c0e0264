"""Files as trees of plain data and back, by their kind, so that a case can change what a file says.

A kind is a file's suffix or a name that a format gives (`plan`, JSON with a digest of the plan).
"""

import csv
import io
import json
import struct
from typing import Any

import yaml

from rotquant.foundation.files import short_hash
from tests.trials.fuzz.mutation import JSON_TEXTS, TWICE, YAML_TEXTS, Raw

#: Kinds that are trees; any other is changed as bytes alone.
KINDS = ("json", "yaml", "jsonl", "csv", "safetensors", "plan", "parquet", "lines")


def texts_of(kind: str) -> tuple[Raw, ...]:
    """What a kind of file can say and plain data cannot."""
    if kind == "yaml":
        return YAML_TEXTS
    return JSON_TEXTS if kind in ("json", "jsonl", "safetensors", "plan") else ()


def decode(kind: str, content: bytes) -> Any:
    """What a valid file of that kind says."""
    if kind == "yaml":
        return _plain(yaml.safe_load(content))
    if kind == "jsonl":
        return [json.loads(line) for line in content.splitlines() if line.strip()]
    if kind == "csv":
        return [*csv.reader(io.StringIO(content.decode()))]
    if kind == "safetensors":
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        return header | {name: json.loads(text) for name, text in _metadata(header).items()}
    if kind == "plan":
        return json.loads(content)["plan"]
    if kind == "parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    if kind == "lines":
        return content.decode().split("\n")
    return json.loads(content)


def encode(kind: str, tree: Any, original: bytes) -> bytes:
    """A file of that kind that says a tree; `original` gives what the tree does not hold, as tensors."""
    if kind == "jsonl":
        return b"\n".join(map(_json, tree)) if isinstance(tree, list) else _json(tree)
    if kind == "csv":
        return _csv(tree)
    if kind == "safetensors":
        return _safetensors(tree, original)
    if kind == "plan":
        text = _json(tree)
        return b'{"digest": "%s", "plan": %s}\n' % (short_hash(text.decode(errors="replace")).encode(), text)
    if kind == "parquet":
        return _parquet(tree, original)
    if kind == "lines":
        lines = tree if isinstance(tree, list) else [tree]
        return "\n".join(map(str, lines)).encode(errors="surrogatepass")
    return _json(tree)


def _plain(tree: Any) -> Any:
    """Data of YAML with the keys that JSON has, so that it can be written as JSON, which is YAML too."""
    if isinstance(tree, dict):
        return {str(key): _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list) else tree


def _json(tree: Any) -> bytes:
    raws: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value)
            return f"@@raw{len(raws) - 1}@@"
        if isinstance(value, dict):
            return {str(key): marked(inner) for key, inner in value.items()}
        return [marked(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(marked(tree), default=str).replace(f'"{TWICE}', '"')
    for number, raw in enumerate(raws):
        text = text.replace(f'"@@raw{number}@@"', raw)
    return text.encode(errors="surrogatepass")


def _csv(tree: Any) -> bytes:
    rows = tree if isinstance(tree, list) else [tree]
    lines = io.StringIO()
    for row in rows:
        cells = row if isinstance(row, list) else [row]
        try:
            csv.writer(lines, lineterminator="\n").writerow(cells)
        except csv.Error:
            lines.write(f"{row}\n")
    return lines.getvalue().encode(errors="surrogatepass")


def _metadata(header: Any) -> dict[str, str]:
    """Texts of a header's metadata that are JSON themselves, as values of its tree."""
    told = header.get("__metadata__", {})
    return {f"@@json@@{name}": text for name, text in told.items() if text[:1] in "[{"}


def _safetensors(tree: Any, original: bytes) -> bytes:
    (length,) = struct.unpack("<Q", original[:8])
    if isinstance(tree, dict):
        inside = {name: _json(value).decode(errors="replace") for name, value in tree.items() if "@@json@@" in name}
        tree = {name: value for name, value in tree.items() if name not in inside}
        metadata = tree.get("__metadata__")
        if isinstance(metadata, dict):
            told = {name.replace("@@json@@", ""): text for name, text in inside.items()}
            tree["__metadata__"] = metadata | {
                name: text for name, text in told.items() if name not in metadata or _is_json(metadata[name])
            }
    header = _json(tree)
    return struct.pack("<Q", len(header)) + header + original[8 + length :]


def _is_json(text: Any) -> bool:
    return isinstance(text, str) and text[:1] in "[{"


def _parquet(tree: Any, original: bytes) -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tree), out)
    except Exception:  # what no table holds is no case; its bytes are
        return original[: len(original) // 2]
    return out.getvalue()

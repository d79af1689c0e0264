"""Files of a checkpoint other than configuration and weights: tokenizer, chat template, generation settings, licence,
origin.

Whatever is made of a checkpoint takes them along byte for byte, so that it reads, writes and may be passed on as the
checkpoint. What describes other weights (a model card, other formats) stays behind and is named. No torch is loaded.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from rotquant.foundation.errors import CheckpointError
from rotquant.foundation.files import check_regular
from rotquant.models.folders import DECODER_MANIFEST, MANIFEST
from rotquant.models.gguf.importing import ORIGIN

GENERATION = "generation_config.json"
_VOCABULARY = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken")
#: Files of a tokenizer.
TOKENIZER = (*_VOCABULARY, "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template*")
#: What goes along, by name.
TAKEN = (
    *TOKENIZER,
    *(GENERATION, "additional_chat_templates/*.jinja", "*processor_config.json"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", ORIGIN),
)
#: Weights and what belongs to them, in any format, and the files that each kind of folder has of its own.
_WEIGHTS = (
    *("config.json", "*.index.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack"),
    *("*.gguf", "*.onnx", MANIFEST, DECODER_MANIFEST),
)


def companions(folder: str | Path) -> dict[str, bytes]:
    """The files of a model's folder that go along with what is made of it, by their names.

    Raises:
        CheckpointError: one of them is a pipe or device.
    """
    folder, found = Path(folder), dict[str, bytes]()
    for path in sorted(path for pattern in TAKEN for path in folder.glob(pattern) if not path.is_dir()):
        check_regular(path, CheckpointError)
        found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def left_out(folder: str | Path, taken: tuple[str, ...] = TAKEN) -> tuple[str, ...]:
    """Names of the files and folders that stay behind, but for weights, configuration and what is hidden.

    Args:
        taken: what goes along, as patterns.
    """
    names = []
    for path in sorted(Path(folder).iterdir()):
        if path.is_dir():
            inside = [f"{path.name}/{one.name}" for one in path.iterdir()]
            names += [] if inside and all(_matches(name, taken) for name in inside) else [f"{path.name}/"]
        elif not _matches(path.name, (*taken, *_WEIGHTS)):
            names.append(path.name)
    return tuple(name for name in names if not name.startswith("."))


def left_out_note(model: str | Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """A sentence about what stays behind, or none."""
    return (f"note: not copied from {model}: {', '.join(names)}",) if names else ()


def write_companions(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files of `companions` into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def has_tokenizer(files: Mapping[str, bytes]) -> bool:
    """Whether there is a tokenizer among files of `companions`."""
    return any(_matches(name, _VOCABULARY) for name in files)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

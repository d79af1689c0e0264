"""Options that several commands share, and their translation into recipes and corpora."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from rotquant.commands.outputs import MODEL, RECIPE, Reads, place_of
from rotquant.foundation.data import merge, nested
from rotquant.foundation.errors import CheckpointError, ConfigError, RecipeError
from rotquant.foundation.files import read_text
from rotquant.foundation.written import yaml_value
from rotquant.models.architectures import check_family
from rotquant.models.folders import Kind, check_kind, located, read_config
from rotquant.models.gguf.header import is_gguf
from rotquant.models.gguf.importing import checked
from rotquant.recipes.corpus import BOS, SPLITS, WIKITEXT2
from rotquant.recipes.corpus import Split as TextSplit
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe, override_all, parse_recipe
from rotquant.tensors.devices import check_device, check_dtype
from rotquant.text import CorpusSpec, check_split, corpus_spec, split_of_file

#: Characters of an option that a sentence repeats.
_SHOWN = 100


def method_names() -> list[str]:
    """What a shell completes methods with."""
    return list(all_presets())


def not_empty(value: str) -> str:
    """Refuse an argument that is empty, which a shell makes of a variable that is not set."""
    if not value.strip():
        raise typer.BadParameter("it is empty")
    return value


# What follows checks arguments where they are read: before torch is loaded, which takes seconds.


def a_model(model: str) -> str:
    """Refuse what is neither a folder, a GGUF file nor a hub id, and a local model of a family that has no adapter."""
    if is_gguf(not_empty(model)):
        checked(model)  # which `located` would dequantize
    else:
        located(model)
        with suppress(CheckpointError):  # which those say who load it
            if "model_type" in (config := read_config(Path(model))):
                check_family(config)
    return model


def a_checkpoint(model: str) -> str:
    """Refuse what `a_model` does, and a folder that holds no plain checkpoint."""
    if not is_gguf(a_model(model)) and (folder := located(model)[0]) is not None:
        check_kind(folder, "plain")
    return model


def _folder_of(kind: Kind) -> Callable[[Path], Path]:
    def check(folder: Path) -> Path:
        check_kind(folder, kind)
        return folder

    return check


def _a_device(name: str) -> str:
    check_device(name)
    return name


def _a_dtype(name: str | None) -> str | None:
    if name is not None:
        check_dtype(name)
    return name


def known_bos(value: str | None) -> str | None:
    """Refuse a place of BOS that is none of `BOS`."""
    if value not in (None, *get_args(BOS)):
        raise typer.BadParameter(f"unknown place of BOS {value!r}; use {', '.join(get_args(BOS))}")
    return value


def place_of_bos(given: str | None, usual: BOS = "text") -> BOS:
    """Where BOS stands by an option: as given, else as usual."""
    return cast(BOS, given or usual)


#: Keys of the answer of a command that makes a folder of a model.
MADE = {
    "model": "",
    "output": "the folder",
    "bytes": "of the folder",
    "left_out": "files of the model that are not copied",
}
TEXT = Reads(lambda given: place_of(corpus_spec(given).path))
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", callback=a_checkpoint, help="A plain checkpoint: Hugging Face folder, GGUF file or hub id."
    ),
    MODEL,
]
AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        callback=a_model,
        help="A plain checkpoint (Hugging Face folder, GGUF file or hub id), or a folder of `rotquant quantize` or "
        "`convert`.",
    ),
    MODEL,
]
Quantized = Annotated[
    Path,
    typer.Argument(metavar="MODEL", callback=_folder_of("quantized"), help="Folder written by `rotquant quantize`."),
    MODEL,
]
Converted = Annotated[
    Path,
    typer.Argument(metavar="MODEL", callback=_folder_of("decoder"), help="Folder written by `rotquant convert`."),
    MODEL,
]
_TEXT_OPTION = typer.Option(
    "--corpus",
    callback=lambda text: text if text is None else not_empty(text),
    autocompletion=lambda: [WIKITEXT2.name],
    help="Text: a folder of parquet, json, jsonl or txt files named for their splits; one such file, of which the "
    "first 80 % are for training and calibration, the next 10 % for validation and the rest for tests; `wikitext2` of "
    "the hub; or a hub id with an optional configuration, e.g. allenai/c4:en.",
)
Corpus = Annotated[str, _TEXT_OPTION, TEXT]
AnyCorpus = Annotated[str | None, _TEXT_OPTION, TEXT]
Method = Annotated[
    str,
    typer.Option(
        autocompletion=method_names,
        help="A method of `rotquant methods`, which says what each is. Or a file, .yaml or .json, with a recipe as "
        "`rotquant recipe METHOD --format yaml` prints it.",
    ),
    RECIPE,
]
Samples = Annotated[
    int | None, typer.Option(min=1, help="Calibration samples. Default: the recipe's, 128 of most presets.")
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens per calibration sample, and per sequence that rotations are learned on. Default: the recipe's; of "
        "a preset what model and tokenizer allow, at most 2048.",
    ),
]
Bos = Annotated[
    str | None,
    typer.Option(
        callback=known_bos,
        help="Where BOS stands: once at the head of the text (text), of each window or item (window), or nowhere "
        "(none); after a prefix that holds BOS, nowhere. Default: as the papers, text.",
    ),
]
MethodName = Annotated[
    str,
    typer.Argument(metavar="METHOD", autocompletion=method_names, help="A method of `rotquant methods`."),
]
Split = Annotated[
    str | None,
    typer.Option(
        autocompletion=lambda: list(SPLITS),
        help="train, validation or test. Default: test, or validation where --corpus is one file named for it.",
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="Draws rotation, calibration sample and order of learning.")
]
Device = Annotated[
    str, typer.Option(callback=_a_device, help="cpu, cuda, cuda:1 ... ; auto takes a GPU when there is one.")
]
Dtype = Annotated[
    str,
    typer.Option(
        callback=_a_dtype,
        help="Floating-point type of the network: float32, in which rotating a model rounds almost nothing away, or "
        "bfloat16 or float16, in half the memory.",
    ),
]
LoadedDtype = Annotated[
    str | None,
    typer.Option(
        callback=_a_dtype,
        help="Floating-point type in which the model runs: float32, bfloat16 or float16. Default: a quantized folder's "
        "own, which alone reproduces its numbers; of a plain checkpoint float32, 4 bytes a parameter.",
    ),
]
WrittenDtype = Annotated[
    str | None,
    typer.Option(callback=_a_dtype, help="float32, bfloat16 or float16. Default: the model's own, which is exact."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Change a recipe field, e.g. --set weights.scheme.bits=3 --set rotation=null. Repeatable."
    ),
]


def named_corpus(text: str | None) -> CorpusSpec:
    """The corpus of `--corpus`.

    Raises:
        RecipeError: none is named.
    """
    if text is None:
        raise RecipeError("this reads text: name it with --corpus, wikitext2 of the hub, or a folder or file of yours.")
    return corpus_spec(text)


def chosen_split(split: str | None, spec: CorpusSpec) -> TextSplit:
    """The split of `--split`, or the one that a corpus is measured on by default.

    Raises:
        RecipeError, CorpusError: no such split, or none of the corpus, or no corpus.
    """
    if split is not None and split not in SPLITS:
        raise RecipeError(f"unknown split {split!r}; use train, validation or test.")
    chosen = cast(TextSplit, split or split_of_file(spec))
    check_split(spec, chosen)
    return chosen


def named_recipe(method: str) -> Recipe:
    """The recipe that a user names: a preset, or a file that holds one.

    Raises:
        ConfigError, RecipeError, ResultError: no such method, or a file that cannot be read or holds no recipe.
    """
    path = Path(method).expanduser()
    if path.suffix not in (".yaml", ".yml", ".json"):
        return preset(method)
    data = yaml_value(read_text(path, "recipe", "write it in UTF-8"), f"recipe {path}")
    if not isinstance(data, dict):
        raise RecipeError(f"recipe {path} holds no fields: write it as `rotquant recipe METHOD --format yaml` does.")
    return parse_recipe(data, f"recipe {path}")


def with_options(
    recipe: Recipe,
    samples: int | None,
    sequence_length: int | None,
    changes: list[str] | None,
    bos: str | None = None,
) -> Recipe:
    """A recipe with what the command line says: the options of its texts, then --set. Those not given change nothing.

    Raises:
        RecipeError: an option that is not written so, an unknown field or an impossible value.
    """
    shape = {"sequence_length": sequence_length, "bos": bos}
    shape = {name: value for name, value in shape.items() if value is not None}
    calibration = shape | ({} if samples is None else {"samples": samples})
    texts = {name: {"text": shape} for name, method in recipe.methods.items() if method.own_text and shape}
    text: dict[str, Any] = {"methods": texts} if texts else {}
    if recipe.calibration and calibration:
        text["calibration"] = calibration
    return changed(override_all(recipe, [text], "calibration options") if text else recipe, changes)


def changed(recipe: Recipe, changes: list[str] | None) -> Recipe:
    """Apply `--set path=value` options in order; values are YAML, so numbers, true, null and {a: 1} mean themselves.

    Only all of them together have to make a valid recipe, so changes that need each other are given in any order.

    Raises:
        RecipeError: an option that is not written so, an unknown field or an impossible value.
    """
    if not changes:
        return recipe
    for text in changes:
        if text.partition("=")[0].endswith(".corpus"):
            raise RecipeError(f"{_named(text)}: which text is read says --corpus; a recipe has only how much of it.")
    where = _named(changes[0]) if len(changes) == 1 else "--set"
    return override_all(recipe, [_change(text) for text in changes], where)


def changes_of(changes: list[str] | None) -> dict[str, Any]:
    """Parse `--set path=value` options into nested data of one recipe change.

    Raises:
        RecipeError: an option that is not written so.
    """
    return reduce(merge, map(_change, changes or ()), {})


def rotation_fields(changes: list[str] | None) -> frozenset[str]:
    """The fields of the rotation that `--set` options name: what somebody chose does not change to fit a model."""
    named = changes_of(changes).get("rotation")
    return frozenset(named if isinstance(named, dict) else ())


def _named(change: str) -> str:
    """An option as sentences name it, of a long one its beginning."""
    return f"--set {change[:_SHOWN]}{'...' * (len(change) > _SHOWN)}"


def _change(text: str) -> dict[str, Any]:
    """`a.b=value` as {"a": {"b": value}}."""
    path, equals, value = text.partition("=")
    parts = path.split(".")
    if not equals or not all(parts) or not value.strip():
        raise RecipeError(f"{_named(text)}: write it as field.subfield=value; null as the value leaves a section out.")
    try:
        given: Any = yaml_value(value, "the value")
    except ConfigError as error:
        problem = re.sub(
            r"^the value(?:, line \d+| is not valid YAML)?(?:: line \d+, column \d+)?:? ?", "", str(error)
        ).rstrip(".")
        raise RecipeError(
            f"{_named(text)}: the value is not YAML ({problem}); write it as 3, true, null or {{a: 1}}."
        ) from None
    return nested(path, given)

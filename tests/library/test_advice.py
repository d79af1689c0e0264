"""Advice is tried: what a sentence recommends works on the model and recipe that got it, at once."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from rotquant.commands.options import changed, changes_of
from rotquant.formats.engines import check_engine
from rotquant.formats.export import running
from rotquant.foundation.errors import RecipeError
from rotquant.models.architectures import architecture_of
from rotquant.recipes.presets import all_presets, preset
from tests.helpers.checkpoints import byte_level, save_words, tiny_tokenizer
from tests.helpers.commands import SMALL, rotquant
from tests.helpers.models import AWKWARD, FURTHER, tiny_model

#: Changes of which every preset takes some and refuses others.
CHANGES = (
    *("weights.clip_search=true", "weights.clip_search=false", "weights.scheme.bits=8", "weights.scheme.bits=2"),
    *("weights.scheme.symmetric=true", "weights.scheme.symmetric=false", "weights.scheme.zero_point=exact"),
    *("weights.scheme.granularity=tensor", "weights.scheme.granularity=channel", "weights=null"),
    *("activations.symmetric=true", "activations.symmetric=false", "activations.dynamic=false", "activations=null"),
    *("keys.dynamic=false", "keys.zero_point=exact", "keys=null", "rotation=null", "rotation={}", "methods.gptq={}"),
)


@pytest.mark.parametrize("name", all_presets())
def test_what_a_recipes_sentence_says_to_set_makes_it_valid(name: str) -> None:
    for change in CHANGES:
        try:
            changed(preset(name), [change])
        except RecipeError as error:
            for place, value in re.findall(r"\bset ([\w.]+\.[\w.]+) to (true|false|null|\d+|whole)\b", str(error)):
                changed(preset(name), [change, f"{place}={value}"])


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "smollm": FURTHER["smollm-135m"],
    "mixtral": FURTHER["mixtral"],
    "mistral": AWKWARD["mistral"],
}
GROUPS = "--set weights.scheme.granularity=group --set weights.scheme.group_size="
PACKED = "export --format compressed-tensors"
#: Model, options of `quantize`, what is refused then, if it is not
#: `quantize` itself, and the kinds of advice of its sentence.
CASES = [
    ("llama", "--method quarot-rtn", "export", ["quantize with"]),
    ("llama", "--method quarot-rtn", "export --format gguf", ["quantize with"]),
    ("llama", "--method quarot-rtn", f"{PACKED} --for any", ["quantize with", "export --for"]),
    ("llama", "--method quarot-rtn", f"{PACKED} --for vllm", ["export with", "export --for"]),
    ("llama", "--method prefixquant", f"{PACKED} --for vllm", ["export --for"]),
    ("llama", "--method quik --set methods.outliers.features=8", PACKED, ["quantize with"]),
    ("llama", f"--method gptq --set methods.gptq.act_order=true {GROUPS}16", PACKED, ["quantize with"]),
    ("llama", f"--method rtn {GROUPS}40", PACKED, ["quantize with"]),
    ("llama", "--method quip-sharp", PACKED, ["export with --format plain"]),
    ("mixtral", "--method rtn", PACKED, ["export with --format plain"]),
    ("mistral", "--method rtn", "export --format gguf", ["export with --format plain"]),
    ("smollm", "--method quarot-rtn --set rotation.heads=true", "", ["change the recipe,"]),
    ("llama", "--method quarot-128g", "", ["change the recipe,"]),
]  # fmt: skip
_SET = r"(?: --set \S+?(?=[,;.]?(?:\s|$)))+"


def advised(sentence: str) -> Iterator[tuple[str, str, str]]:
    """The pieces of advice in a sentence: its kind, options of `quantize`, options of the command itself."""
    options = {kind: re.findall(rf"{kind}({_SET})", sentence) for kind in ("quantize with", "and export with")}
    for made in options["quantize with"]:
        yield "quantize with", made, "".join(options["and export with"])
    if not options["and export with"]:
        yield from (("export with", "", found) for found in re.findall(rf"export with({_SET})", sentence))
    if "export --for transformers" in sentence:
        yield "export --for", "", " --for transformers"
    if "export with --format plain" in sentence:
        yield "export with --format plain", "", " --format plain"
    yield from (("change the recipe,", found, "") for found in re.findall(rf"change the recipe,({_SET})", sentence))


@pytest.mark.parametrize("name", [name for name in all_presets() if name != "baseline"])
def test_what_an_engine_cannot_say_of_a_preset_is_said_with_all_that_has_to_change(name: str) -> None:
    """Of presets that the format can hold at all: nothing is refused next."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_hidden_layers=1)
    recipe, shape = preset(name), architecture_of(config)
    try:
        check_engine(recipe, shape, "transformers")
    except RecipeError:
        return
    for engine in ("vllm", "any"):
        try:
            check_engine(recipe, shape, engine)
        except RecipeError as error:
            ways = [(made, changes) for kind, made, changes in advised(str(error)) if kind != "export --for"]
            for made, changes in ways:
                new = changed(recipe, re.findall(r"--set (\S+)", made))
                check_engine(running(new, changes_of(re.findall(r"--set (\S+)", changes))), shape, engine)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models and a text."""
    folder = tmp_path_factory.mktemp("advice")
    for name, shape in MODELS.items():
        tiny_model(**shape).save_pretrained(folder / name)
        tokenizer = byte_level() if name == "llama" else tiny_tokenizer()  # of the kind that GGUF has
        tokenizer.save_pretrained(folder / name)
    save_words(folder / "words.txt", 4000)
    return folder


@pytest.mark.parametrize(("model", "options", "then", "kinds"), CASES)
def test_advice_of_a_refusal_is_not_refused(
    model: str,
    options: str,
    then: str,
    kinds: list[str],
    places: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "gguf" in then:
        pytest.importorskip("gguf")
    monkeypatch.chdir(places)
    shutil.rmtree("quantized", ignore_errors=True)

    def run(made: str = "", more: str = "") -> str:
        """What is said of the refusal of either command; nothing where both work."""
        made_before = not made and Path("quantized").exists()
        for folder in ["exported"] if made_before else ["quantized", "exported"]:
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).unlink(missing_ok=True)
        quantize = f"quantize {model} -o quantized {options}{made} --corpus words.txt --no-check"
        command, _, rest = then.partition(" ")
        export = f"{command} quantized -o exported {rest}{more}"
        for line in [*[quantize] * (not made_before), *[export] * bool(then)]:
            capsys.readouterr()
            status = rotquant(monkeypatch, *shlex.split(line), *(SMALL if line is quantize else ()))
            if status:
                assert status == 2
                return " ".join(capsys.readouterr().err.split()).rpartition("rotquant: ")[2]
        return ""

    sentence = run()
    assert sentence
    found = list(advised(sentence))
    assert [kind for kind, _, _ in found] == kinds, sentence
    for _, made, more in found:
        assert run(made, more) == "", (sentence, made, more)


def test_the_command_that_the_wrong_kind_of_folder_is_told_to_run_works(
    places: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(places)
    for command in ("convert llama -o decoder", "generate llama --prompt w3"):
        for folder in ("quantized", "decoder"):
            shutil.rmtree(folder, ignore_errors=True)
        assert rotquant(monkeypatch, *shlex.split(command)) == 2
        said = re.findall(r"`rotquant ([^`]+)`", " ".join(capsys.readouterr().err.split()))
        assert said
        for line in said:
            more = ["--corpus", "words.txt", "--no-check", *SMALL] if line.startswith("quantize") else []
            assert rotquant(monkeypatch, *shlex.split(line), *more) == 0, capsys.readouterr().err
        assert rotquant(monkeypatch, *shlex.split(command)) in (0, 2)

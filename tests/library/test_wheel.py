"""The library's sdist and wheel work alone: far from a checkout, in an environment without the reproduction.

The wheel of the environment is built from the sdist, as `pip install rotquant-0.2.0.tar.gz` does.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import rotquant as rotquant_package
from tests.helpers.checkpoints import save_words, tiny_tokenizer
from tests.helpers.models import tiny_model

REPOSITORY = Path(__file__).parents[2]

#: Runs the commands of a JSON list one after the other, then compiles a kernel and prints where its sources lie.
COMMANDS = """
import json, sys
from rotquant.cli import app
for command in json.loads(sys.argv[1]):
    sys.argv = ["rotquant", *command]
    try:
        app()
    except SystemExit as stop:
        assert not stop.code, command
from rotquant.kernels.hadamard import launch
from rotquant.kernels.launch.loading import SOURCES, compile_source
assert compile_source(launch.sources("sm_90a")[0], "sm_90a").cubin.read_bytes()[:4] == b"\\x7fELF"
print(SOURCES)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("rotquant", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel, and of all that is installed here what is not ours."""
    folder = tmp_path_factory.mktemp("environment")
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    shutil.unpack_archive(wheel, site, "zip")
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "rotquant" not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def test_sdist_and_wheel_hold_all_sources_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        of_wheel = {name for name in archive.namelist() if name.startswith("rotquant/")}
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive), "a link would lead out of the archive"
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    kernels = {f"rotquant/kernels/sources/{path.relative_to(REPOSITORY / 'kernels')}" for path in sources()}
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "rotquant").rglob("*.py")}
    assert of_wheel == kernels | modules | {"rotquant/py.typed", "rotquant/costs/records.json"}
    assert {name for name in names if name.startswith("rotquant/")} == of_wheel
    others = {name.partition("/")[0] for name in names} - {"rotquant", "rotquant.egg-info"}
    assert others == {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}


def sources() -> Iterator[Path]:
    """The files that kernels are compiled from."""
    for path in (REPOSITORY / "kernels").rglob("*"):
        if path.suffix in (".cu", ".cuh", ".cpp", ".h"):
            yield path


def test_the_metadata_is_valid_and_the_readme_renders(built: Path) -> None:
    """What `twine check` asks, which is not among the locked packages."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        written = [archive.read(name)]
    with tarfile.open(sdist) as archive:
        (member,) = (member for member in archive if member.name.count("/") == 1 and member.name.endswith("PKG-INFO"))
        written.append(archive.extractfile(member).read())
    for content in written:
        found = Metadata.from_email(content, validate=True)  # which raises for what an index would refuse
        assert (found.name, str(found.version)) == ("rotquant", rotquant_package.__version__)
        assert found.description_content_type == "text/markdown"
        assert "<h1>rotquant</h1>" in MarkdownIt("commonmark").render(found.description)
        assert set(found.provides_extra) >= {"serve", "study"}
    assert written[0] == written[1]


def test_the_reproduction_asks_for_what_the_extra_names() -> None:
    """Everything that it imports beyond the library's own requirements is in `rotquant[study]`."""
    library, own = (tomllib.loads((REPOSITORY / path).read_text())["project"] for path in PROJECTS)
    assert own["dependencies"] == ["rotquant[study]"]
    assert all(of == [f"rotquant[{name}]"] for name, of in own["optional-dependencies"].items())
    required = [*library["dependencies"], *library["optional-dependencies"]["study"]]
    named = {Requirement(line).name.lower().replace("-", "_") for line in required}
    files = (REPOSITORY / "workflow/reproduction").rglob("*.py")
    imported = {name for file in files for name in imports(file)} - sys.stdlib_module_names
    known = {
        "yaml": "pyyaml",
        "markdown_it": "markdown_it_py",
        "huggingface_hub": "transformers",
        "cupy": "cupy_cuda13x",
    }
    unnamed = {name for name in imported if known.get(name, name).lower() not in named}
    assert unnamed - {"rotquant", "reproduction"} == OF_OTHERS


PROJECTS = ("pyproject.toml", "workflow/pyproject.toml")
#: Parts of pydantic and MLflow that are packages of their own, and what lm-eval requires.
OF_OTHERS = {"pydantic_core", "rouge_score", "sqlalchemy"}


def imports(file: Path) -> Iterator[str]:
    """Top-level names of the packages that a file imports, lazily or not."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.mark.long
def test_the_commands_about_models_and_the_kernels_come_with_the_wheel(python: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"COLUMNS": "300"}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [python, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    tiny_model(hidden_size=256, intermediate_size=384, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    save_words(tmp_path / "words.txt", 4000)
    text = ("--corpus", "words.txt", "--sequence-length", "24", "--device", "cpu")
    commands = (
        ("quantize", "model", "-o", "quantized", "--samples", "4", *text),
        ("evaluate", "quantized", *text),
        ("convert", "quantized", "-o", "converted"),
        ("diagnose", "model", "--max-windows", "2", *text),
        ("doctor",),
    )
    done = run("-c", COMMANDS, json.dumps(commands))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert (tmp_path / "converted/decoder.json").is_file()
    assert Path(done.stdout.splitlines()[-1]).is_relative_to(python.parents[1])
    refused = run("-m", "rotquant", "runs", "list")
    assert refused.returncode == 2
    assert "`rotquant runs` is a command of the reproduction, which is not installed" in refused.stderr

"""`rotquant corpus` and `rotquant pack`: the texts that every installation has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.table import Table

from reproduction.corpora import corpus_spec
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import TEXT
from rotquant.commands.outputs import NEW, Writes
from rotquant.foundation.files import OutputKind
from rotquant.recipes.corpus import CALIBRATION_CHARACTERS, SPLITS

if TYPE_CHECKING:
    from rotquant.recipes.corpus import Split


@answers({"corpus": "", "splits": "by name: rows, characters, sha256, and the recorded sha256 or null"})
def corpus(
    corpus: Annotated[
        str,
        typer.Argument(
            help="`modules` or `docstrings` (source files, documentation strings of the installed packages), or what "
            "--corpus of `rotquant evaluate` takes."
        ),
        TEXT,
    ] = "modules",
    split: Annotated[list[str] | None, typer.Option(help="Split to read; repeatable. Default: all three.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Also write the splits here, a folder that --corpus takes."),
        Writes(
            OutputKind("a text of before"),
            files=lambda folder, given: (folder / f"{name}.jsonl" for name in given.get("split") or SPLITS),
        ),
    ] = None,
) -> CommandResult:
    """Build or read a text corpus; print its size, its content hash and whether that is the recorded one.

    Example: `rotquant corpus modules --split test -o corpus/`
    """
    from reproduction.run.stages.text import expected_hashes
    from rotquant.foundation.files import check_output_file, write_text
    from rotquant.text import content_hash, load_rows

    names = cast("Sequence[Split]", split or SPLITS)
    if output is not None:
        for name in names:
            check_output_file(output / f"{name}.jsonl")
    spec = corpus_spec(corpus)
    recorded = expected_hashes(spec)
    table = Table("split", "rows", "characters", "sha256", "as recorded", title=f"corpus {spec.name}")
    found = {}
    for name in names:
        rows = load_rows(spec, name)
        text = spec.separator.join(rows)
        digest = content_hash(text)
        verdict = "-" if name not in recorded else "yes" if recorded[name] == digest else f"no, {recorded[name][:12]}"
        table.add_row(name, f"{len(rows):,}", f"{len(text):,}", digest[:12], verdict)
        about = {"rows": len(rows), "characters": len(text), "sha256": digest}
        found[name] = {**about, "recorded": recorded.get(name)}
        if output:
            write_text(output / f"{name}.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    return CommandResult({"corpus": spec.name, "splits": found}, (table,))


@answers({"output": "the folder", "files": "how many"})
def pack(
    output: Annotated[Path, typer.Argument(help="Folder to write."), NEW],
    characters: Annotated[
        int, typer.Option(min=1, help="Of the train split only the head, of so many characters of each corpus.")
    ] = CALIBRATION_CHARACTERS,
) -> CommandResult:
    """Copy the source files that the corpora modules and docstrings are read from, for a machine without them.

    There ROTQUANT_PACKAGES, set to the folder, makes them the text that it is here.

    Example: `rotquant pack packages/`
    """
    from reproduction.run import packing
    from rotquant.foundation.files import cache_folder, check_output_folder

    check_output_folder(output)
    files = packing.pack(output, cache_folder("corpora"), characters)
    return CommandResult({"output": str(output), "files": files}, (f"{files:,} files in {output}",))

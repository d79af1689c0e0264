"""`rotquant tune`: choose a method's settings for the models of a configuration, on validation text."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from reproduction.commands.runs import Configs, Jobs, OtherDevice, device_of, open_project
from reproduction.run.tuning import RECORDS, at_an_end, points, read_grid, tune
from reproduction.run.workers import usual_workers
from reproduction.tables.configuration import find_root
from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.options import Changes, MethodName, changes_of
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import ConfigError, RecipeError
from rotquant.foundation.files import OutputKind, check_output_file, has_keys
from rotquant.recipes.presets import preset
from rotquant.recipes.recipe import override_all

RECORD = OutputKind("a record of `rotquant tune`", has_keys("grid", "points", "chosen"))


def _records(output: Path, given: Mapping[str, Any]) -> list[Path]:
    with suppress(ConfigError):  # which the command itself says, after what is wrong with its options
        return [find_root() / output / f"{given['method']}-{slot}.json" for slot in given["slots"]]
    return []


@answers(
    {
        "slots": "by model: what the configuration should say",
        "records": "by model: its grid, every point, the chosen one",
    }
)
def tune_method(
    method: MethodName,
    slots: Annotated[list[str], typer.Argument(metavar="SLOT...", help="Models by their names in the configuration.")],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            help="A field of the recipe's methods and the values to try, e.g. --grid learning_rate=1e-4,2e-4,5e-4; "
            "`method.field` where two have it. Repeatable: every combination is tried."
        ),
    ] = None,
    changes: Changes = None,
    seeds: Annotated[str, typer.Option(help="Seeds of each point, e.g. 0,1,2. Default: the configuration's.")] = "",
    max_windows: Annotated[
        int | None, typer.Option(min=1, help="Windows of validation text. Default: as many as tables evaluate on.")
    ] = None,
    jobs: Jobs = None,
    device: OtherDevice = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the records."), Writes(RECORD, files=_records)
    ] = RECORDS,
    config: Configs = None,
) -> CommandResult:
    """Choose settings of METHOD for each SLOT: the least perplexity on the *validation* text, as a mean over seeds.

    Amounts of text and work are the configuration's. Each record lies in the folder as METHOD-SLOT.json; what it has
    already is kept. Printed at the end is what the configuration should say. Test text is never read.

    Example: `rotquant tune llm-qat Llama-2-13B --grid learning_rate=1e-4,2e-4,5e-4,1e-3`
    """
    wanted = changes_of(changes)
    values = read_grid(grid or [], override_all(preset(method), [wanted], "--set"))
    if not values:
        raise RecipeError("there is nothing to choose among: name a field and its values by --grid field=value,value.")
    project = open_project(config)
    chosen = [project.config.slot(slot) for slot in slots]
    drawn = _seeds(seeds) or project.config.seeds
    records = [output / f"{method}-{slot.name}.json" for slot in chosen]
    for record in records:
        check_output_file(record)
    place = device_of(device, project.config.device)
    workers = jobs or usual_workers(place)
    said, kept, shown = {}, {}, []
    for slot, record in zip(chosen, records, strict=True):
        found = tune(
            project, slot, method, values, wanted, drawn, record, place, max_windows=max_windows, workers=workers
        )
        said[slot.name], kept[slot.name] = {"methods": found["chosen"]}, found
        table = Table(
            *found["grid"], "perplexity", "deviation", "seconds", title=f"{method} on {slot.name}, validation"
        )
        for point, tried in zip(found["points"], points(values), strict=True):
            settings = [str(tried[name][field]) for name, field in values]
            deviation = "-" if point["deviation"] is None else f"{point['deviation']:.3f}"
            table.add_row(*settings, f"{point['perplexity']:.3f}", deviation, f"{point['seconds']:.1f}")
        shown.append(table)
        for field in at_an_end(found):
            shown.append(f"{field} on {slot.name}: the best value is at an end of its grid, so try values beyond it.")
    shown += [f"\nIn the configuration (records in {output}):\n", yaml.safe_dump({"slots": said}, sort_keys=False)]
    return CommandResult({"slots": said, "records": kept}, tuple(shown))


def _seeds(text: str) -> tuple[int, ...]:
    """The seeds that "0,1,2" says.

    Raises:
        RecipeError: they are no different whole numbers from 0.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts) or len({*parts}) < len(parts):
        raise RecipeError(f"--seeds {text}: write different whole numbers from 0 on, e.g. 0,1,2.")
    return tuple(map(int, parts))

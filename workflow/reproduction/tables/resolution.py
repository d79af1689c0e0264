"""Resolution of a table's recipes and metrics for one model, with the slot's sizes and amounts.

The papers' group sizes and numbers of outlier features are scaled, amounts of text and work are the slot's, and names
in the configuration that no table knows are refused early. Nothing here imports torch.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from reproduction.metrics.settings import Metric
from reproduction.reading.written import read_yaml
from reproduction.tables.configuration import DEFAULT, Config, Slot
from reproduction.tables.tables import RunTable
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import task_names
from rotquant.foundation.data import first_problem, merge
from rotquant.foundation.errors import ConfigError, RecipeError, RotquantError, nearest
from rotquant.recipes.recipe import Method, Recipe, override
from rotquant.recipes.schemes import Calibration

_METRIC: TypeAdapter[Metric] = TypeAdapter(Metric)


def resolve(recipe: Recipe, slot: Slot, where: str, said: dict[str, Any] | None = None) -> Recipe:
    """Resolve a paper's recipe for one slot: scale group sizes and outlier counts, set amounts of data and work.

    Args:
        said: the row's own changes. Their amounts of data and work are kept, since tables vary these.

    Raises:
        ConfigError, RecipeError: a number that the slot does not map, or a value that the recipe refuses.
    """
    changes: dict[str, Any] = {}
    try:
        for part in ("activations", "keys", "values"):
            scheme = getattr(recipe, part)
            if scheme is not None and scheme.group_size is not None and not scheme.fp4:
                changes[part] = {"group_size": slot.scaled("group_sizes", scheme.group_size)}
        weights = None if recipe.weights is None else recipe.weights.scheme
        if weights is not None and weights.group_size is not None and not weights.fp4:
            rounding = (method.groups for method in recipe.methods.values() if "rounding" in method.roles)
            size = slot.scaled(next(rounding, Method.groups), weights.group_size)
            row = {"granularity": "channel", "group_size": None}
            changes["weights"] = {"scheme": {"group_size": size} if size else row}
        changes["methods"] = {
            name: {
                field: slot.scaled(kind, number)
                for field, kind in method.scaled.items()
                if (number := getattr(method, field)) is not None
            }
            for name, method in recipe.methods.items()
        }
    except RotquantError as error:
        raise ConfigError(f"{where}: {error}") from None
    said = said or {}
    if recipe.calibration is not None:
        texts = merge(_place_of_bos(slot), slot.calibration)
        changes["calibration"] = merge(texts, _text(said.get("calibration") or {}, slot))
    own = said.get("methods") or {}
    settings = slot.methods if recipe.rotation is not None else merge(slot.methods, slot.unrotated)
    for name, scaled in changes["methods"].items():
        kept = {field: value for field, value in settings.get(name, {}).items() if _is_done(recipe, name, field)}
        amounts = merge(kept, _own(own.get(name) or {}, slot))
        if recipe.methods[name].own_text is not None and slot.bos is not None:
            amounts = merge({"text": _place_of_bos(slot)}, amounts)
        changes["methods"][name] = merge(amounts, scaled)
    return override(recipe, changes, where)


def _is_done(recipe: Recipe, name: str, field: str) -> bool:
    """Whether a recipe has an amount of work at all: steps that are 0 stay 0."""
    return getattr(recipe.methods[name], field, None) != 0


def with_less_text(recipe: Recipe, share: float, where: str) -> Recipe:
    """A recipe whose methods read a share of the samples of each of their texts, at least one."""

    def fewer(text: Calibration) -> dict[str, int]:
        return {"samples": max(1, round(share * text.samples))}

    own = {name: one.own_text for name, one in recipe.methods.items()}
    changes: dict[str, Any] = {"methods": {name: {"text": fewer(text)} for name, text in own.items() if text}}
    if recipe.calibration is not None:
        changes["calibration"] = fewer(recipe.calibration)
    return override(recipe, changes, where)


def _place_of_bos(slot: Slot) -> dict[str, Any]:
    """The slot's own place of BOS, as a field of texts and metrics; none where it has none."""
    return {} if slot.bos is None else {"bos": slot.bos}


def _own(settings: dict[str, Any], slot: Slot) -> dict[str, Any]:
    """A row's settings of a method, with the slot's amounts of text in place of the paper's."""
    return {**settings, "text": _text(settings["text"], slot)} if settings.get("text") else settings


def _text(said: dict[str, Any], slot: Slot) -> dict[str, Any]:
    """A row's settings of a text, with the slot's amounts in place of the paper's."""
    known: Mapping[str, Mapping[int, int]] = {**slot.texts}
    return {field: known.get(field, {}).get(value, value) for field, value in said.items()}


def resolve_metric(fields: dict[str, Any], slot: Slot, where: str) -> Metric:
    """Resolve a table's metric for one slot: amounts of text from the slot, the tasks of a suite by name.

    Raises:
        ConfigError: an unknown field, an impossible value or an unknown task.
    """
    texts = dict.fromkeys(("perplexity", "snr", "token_maxima", "outlier_tokens"), slot.evaluation)
    by_kind = {**texts, "zero_shot": slot.zero_shot, "weight_kurtosis": slot.weight_kurtosis}
    shared = by_kind.get(fields["kind"], {})
    if fields["kind"] in ("perplexity", "snr", "zero_shot"):
        shared = {**_place_of_bos(slot), **shared}
    fields = {**shared, **fields}
    # by suite, since suites differ; the slot's own values come first
    for name, default in (("tasks", ()), ("normalization", "length")):
        if isinstance(fields.get(name), dict):
            fields[name] = shared.get(name, fields[name].get(fields.get("suite", "shipped"), default))
    try:
        metric = _METRIC.validate_python(fields)
        return metric.model_copy(update={"tasks": task_names(metric)}) if isinstance(metric, ZeroShot) else metric
    except ValidationError as error:
        raise ConfigError(f"{where}: metric {first_problem(error)}.") from None
    except RecipeError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_names(config: Config, tables: Mapping[str, RunTable], root: Path) -> None:
    """Refuse names that neither a table nor config/config.yaml knows, and missing corpora.

    Raises:
        ConfigError: an unknown slot, corpus, paper or table, a zero-shot suite whose corpus is not defined, or a local
            corpus without its files; the sentence names the file and the key.
    """
    suites = dict(_suite_corpora(config.alone))
    for path, name in suites.items():
        if name not in config.corpora:
            raise ConfigError(f"{config.where(*path)}: unknown corpus {name!r}{nearest(name, [*config.corpora])}.")
    default = read_yaml(root / DEFAULT)
    slots = {column.slot for table in tables.values() for column in table.columns} | {*default.get("slots", ())}
    corpora = {*_corpora([table.model_dump() for table in tables.values()]), *suites.values()}
    corpora |= {*default.get("corpora", ())}
    papers = {table.paper for table in tables.values()}
    sections = (
        ("slots", "slot", slots),
        ("corpora", "corpus", corpora),
        ("dtypes", "paper or table of runs", papers | {*tables}),
        ("table_seeds", "table of runs", {*tables}),
        ("rows", "table of runs", {*tables}),
    )
    for section, kind, known in sections:
        for name in getattr(config, section):
            if name not in known:
                raise ConfigError(f"{config.where(section, name)}: unknown {kind}{nearest(name, [*known])}.")
    for name, corpus in config.corpora.items():
        missing = [
            part.path
            for part in corpus.sources
            if part.source == "local" and not (part.digests or (root / str(part.path)).exists())
        ]
        if missing:
            raise ConfigError(f"{config.where('corpora', name)}.path: there is no folder or file {missing[0]}.")


def _suite_corpora(data: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The corpora of zero-shot tasks, with their location in a configuration."""
    places = [((), data), *((("slots", name), slot) for name, slot in data["slots"].items())]
    for path, fields in places:
        if "corpus" in fields.get("zero_shot", {}):
            yield (*path, "zero_shot", "corpus"), fields["zero_shot"]["corpus"]


def _corpora(data: Any) -> Iterator[str]:
    """The values of the key `corpus` in nested data."""
    if isinstance(data, dict):
        yield from [data["corpus"]] if isinstance(data.get("corpus"), str) else []
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list | tuple) else ():
        yield from _corpora(value)

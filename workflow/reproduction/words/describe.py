"""Recipes, metrics and tables in words, for pages and figures."""

import re

from reproduction.identity.run import Run
from reproduction.tables.configuration import Slot
from reproduction.tables.project import Project
from reproduction.tables.tables import RunTable, Table
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import QuantizationScheme, RotationScheme, WeightQuantization

#: Operations while a model runs, in words.
RUNTIME_WORDS = {
    "activations": "activations",
    "attention_output": "those of o_proj",
    "keys": "keys",
    "values": "values",
}


def title(table: Table) -> str:
    """A table's full name, such as "QuaRot, Table 1: 4-bit perplexity against other methods"."""
    kind, number = (*re.findall("[a-z]+|[0-9]+", table.label), "", "")[:2]
    label = f", {kind.capitalize()} {number}" if is_of_the_paper(table) else ""
    return f"{table.paper_title.split(':')[0]}{label}: {table.title}"


def is_of_the_paper(table: Table) -> bool:
    """Whether a table is in the paper; the others are our own reports."""
    return table.label.startswith(("table", "figure", "lemma"))


def has_hypotheses(table: Table) -> bool:
    """Whether a table's claims are hypotheses: it is in no paper, and quotes none."""
    claims = getattr(table, "claims", ())
    return not is_of_the_paper(table) and table.published is None and not any(claim.quote for claim in claims)


def is_about_models(table: RunTable) -> bool:
    """Whether models are measured; an illustration computes on its own numbers."""
    return any(metric["kind"] not in ("range_use", "hadamard_kurtosis") for metric in table.metrics)


def is_stand_in(slot: Slot) -> bool:
    """Whether a slot's checkpoint differs from the model it is named after, judged by name without hyphens."""
    own, checkpoint = (name.lower().replace("-", "") for name in (slot.name, model_name(slot)))
    return own not in checkpoint


def model_name(slot: Slot) -> str:
    """The last part of a slot's checkpoint, such as "rq-7b" or "Llama-2-7b-hf"."""
    return slot.checkpoint.rstrip("/").split("/")[-1]


def panel_title(project: Project, table: RunTable, column: str) -> str:
    """Title of a figure's panel: a column's name, and below it the checkpoint."""
    return f"{column}\n(here: {model_name(project.slot(table, column))})"


def measurement(run: Run) -> str:
    """Settings given for a run's metric, such as "perplexity: corpus wikitext2, split test, bos text"."""
    fields = {**run.metric.model_dump(exclude={"kind"}), "corpus": corpus_words(run)}
    words = [f"{name} {_plain(value)}" for name, value in fields.items() if value is not None]
    return f"{run.metric.kind}: {', '.join(words)}" if words else run.metric.kind


def corpus_words(run: Run) -> str | None:
    """The text that a run's metric reads, and the text it replaces; None for a metric without one."""
    asked = run.metric.corpus
    if asked is None:
        return None
    name = run.corpora[asked].name
    return name if name == asked else f"{name} (in place of {asked})"


def settings(recipe: Recipe) -> str:
    """All settings of a recipe, in the order in which they act."""
    parts = [_rotation(recipe, recipe.rotation)] if recipe.rotation else []
    parts += [method.describe(recipe) for method in recipe.methods.values() if method.roles - {"rotations", "rounding"}]
    if recipe.weights:
        parts.append(f"weights {_weights(recipe, recipe.weights)}")
    for name, words in RUNTIME_WORDS.items():
        scheme = getattr(recipe, name)
        if scheme:
            parts.append(f"{words} {_scheme(scheme)}{'' if scheme.dynamic else ', static'}")
    if recipe.needs_calibration and recipe.calibration:
        text = recipe.calibration
        where = "" if text.bos == "text" else f", bos {text.bos}"
        parts.append(f"calibration {text.samples} x {text.sequence_length} tokens{where}")
    return "; ".join(parts) or "the model as it is"


def _rotation(recipe: Recipe, rotation: RotationScheme) -> str:
    kinds = {"hadamard": "Hadamard", "random_hadamard": "randomized Hadamard", "orthogonal": "random orthogonal"}
    places = {"R1_attention": "R1 of attention's input", "R1_mlp": "R1 of the MLP's input"}
    fused, online = [], []
    for one in recipe.transforms:
        made = f" {'learned from ' if one.origin == 'learned' else ''}{kinds[one.kind]}" if one.tensors else ""
        blocks = f" in blocks of {one.size}" if one.size else ""
        (online if one.online else fused).append(places.get(one.name, one.name) + made + blocks)
    text = f"rotation {', '.join(fused) or 'none fused'}"
    text += f" ({recipe.learner.describe(recipe)})" if recipe.learner else ""
    text += f"; online {', '.join(online)} in {rotation.online_dtype}" if online else ""
    return text + ("; embeddings centred" if rotation.center_embeddings else "")


def _weights(recipe: Recipe, weights: WeightQuantization) -> str:
    """The integers, their rounding method if it does nothing else, and the clip search."""
    rounding = [method.describe(recipe) for method in recipe.methods.values() if method.roles == {"rounding"}]
    clip = f", clip search in norm {weights.clip_norm:g}" if weights.clip_search else ""
    return f"{_scheme(weights.scheme)}, {rounding[0] if rounding else 'RTN'}{clip}"


def _scheme(scheme: QuantizationScheme) -> str:
    if scheme.fp4:
        rule = "" if scheme.scale == "paper" else f", scales by {scheme.scale.replace('_', ' ')}"
        clip = f", clip {scheme.clip_ratio:g}" if scheme.clip_ratio != 1 else ""
        return f"{scheme.fp4}{rule}{clip}{'' if scheme.dynamic else ', one static scale'}"
    sort = "symmetric" if scheme.symmetric else "asymmetric"
    sort += " with exact zero points" if scheme.zero_point == "exact" else ""
    sort += " over all steps" if scheme.scale == "full" else ""
    sort += " by vLLM's rule" if scheme.rule == "vllm" else ""
    per = f"groups of {scheme.group_size}" if scheme.granularity == "group" else f"per {scheme.granularity}"
    clip = f", clip {scheme.clip_ratio:g}" if scheme.clip_ratio != 1 else ""
    if any(scheme.kept):
        clip += f", the first {scheme.kept_first} and last {scheme.kept_recent} tokens in full precision"
    return f"{'E4M3' if scheme.type == 'float' else f'{scheme.bits}-bit'} {sort} {per}{clip}"


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

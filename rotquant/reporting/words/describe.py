"""Recipes, metrics and tables in words, for pages and figures."""

from rotquant.recipes.recipe import Recipe, Run
from rotquant.recipes.schemes import QuantizationScheme, RotationLearning, RotationScheme, WeightQuantization
from rotquant.study.configuration import Slot
from rotquant.study.project import Project
from rotquant.study.speed.definitions import SpeedTable
from rotquant.study.tables import Table

#: What acts while a model runs, in words.
RUNTIME_WORDS = {
    "activations": "activations",
    "attention_output": "those of o_proj",
    "keys": "keys",
    "values": "values",
}


def title(table: Table | SpeedTable) -> str:
    """A table's name in full, such as "QuaRot, Table 1: 4-bit perplexity against other methods"."""
    label = f", {table.label.replace('table', 'Table ').replace('figure', 'Figure ')}" if is_of_the_paper(table) else ""
    return f"{table.paper_title.split(':')[0]}{label}: {table.title}"


def is_of_the_paper(table: Table | SpeedTable) -> bool:
    """Whether a table stands in the paper; the others are reports of our own."""
    return table.label.startswith(("table", "figure"))


def is_about_models(table: Table) -> bool:
    """Whether models are measured; an illustration computes on numbers of its own."""
    return any(metric["kind"] != "range_use" for metric in table.metrics)


def is_stand_in(slot: Slot) -> bool:
    """Whether a slot's checkpoint is not the model it is named after, judged by its name."""
    return slot.name.lower() not in model_name(slot).lower()


def model_name(slot: Slot) -> str:
    """The last part of a slot's checkpoint, such as "rq-7b" or "Llama-2-7b-hf"."""
    return slot.checkpoint.rstrip("/").split("/")[-1]


def panel_title(project: Project, table: Table, column: str) -> str:
    """A column's name above a figure's panel, and below it the checkpoint it is computed on."""
    return f"{column}\n(here: {model_name(project.slot(table, column))})"


def measurement(run: Run) -> str:
    """All settings of a run's metric that are set, such as "perplexity: corpus wikitext2, split test, bos text"."""
    fields = {**run.metric.model_dump(exclude={"kind"}), "corpus": corpus_words(run)}
    words = [f"{name} {_plain(value)}" for name, value in fields.items() if value is not None]
    return f"{run.metric.kind}: {', '.join(words)}"


def corpus_words(run: Run) -> str | None:
    """The text behind a run's metric, and what it is in place of; None for a metric without one."""
    asked = run.metric.corpus
    if asked is None:
        return None
    name = run.corpora[asked].name
    return name if name == asked else f"{name} (in place of {asked})"


def settings(recipe: Recipe) -> str:
    """All settings of a recipe, in the order in which they act."""
    parts = []
    if recipe.rotation:
        parts.append(_rotation(recipe.rotation))
    if recipe.smoothing:
        parts.append(f"smoothing alpha {recipe.smoothing.alpha:g}")
    if recipe.omniquant:
        omni = recipe.omniquant
        rates = f"lr {omni.clipping_lr:g} clipping, {omni.transformation_lr:g} transformation"
        parts.append(
            f"OmniQuant {omni.steps} steps of {omni.batch_size} a block, {rates}, start alpha {omni.smoothing_alpha:g}"
        )
    if recipe.awq:
        parts.append(f"AWQ, {recipe.awq.grid} values of alpha{', clipped' if recipe.awq.clip_search else ''}")
    if recipe.llm_qat:
        qat = recipe.llm_qat
        text = f"{qat.samples} generated samples of {qat.sequence_length} tokens, seed {qat.seed}"
        parts.append(f"LLM-QAT {qat.steps} steps of {qat.batch_size}, learning rate {qat.learning_rate:g}, on {text}")
    if recipe.quip:
        parts.append(f"QuIP#, damping {recipe.quip.damping:g}, seed {recipe.quip.seed}")
    if recipe.outliers:
        kept = "floating point" if recipe.outliers.bits == 16 else f"{recipe.outliers.bits} bits"
        parts.append(f"{recipe.outliers.features} outlier features in {kept}, ranked by {recipe.outliers.statistic}")
    if recipe.weights:
        parts.append(f"weights {_weights(recipe.weights)}")
    for name, words in RUNTIME_WORDS.items():
        scheme = getattr(recipe, name)
        if scheme:
            parts.append(f"{words} {_scheme(scheme)}{'' if scheme.dynamic else ', static'}")
    if recipe.needs_calibration and recipe.calibration:
        text = recipe.calibration
        parts.append(f"calibration {text.samples} x {text.sequence_length} tokens, seed {text.seed}")
    return "; ".join(parts) or "the model as it is"


def _rotation(rotation: RotationScheme) -> str:
    kinds = {"hadamard": "randomized Hadamard", "orthogonal": "random orthogonal"}
    heads = {"hadamard": "Hadamard", "random_hadamard": "randomized Hadamard", "orthogonal": "random orthogonal"}
    learned = "learned from " if rotation.learning else ""
    fused = [f"R1 {learned}{kinds[rotation.residual]}"] if rotation.residual != "none" else []
    fused += [f"R2 {learned}{heads[rotation.values]}"] if rotation.values != "none" else []
    switches = (("heads", rotation.heads), ("R3", rotation.keys), ("R4", rotation.mlp))
    online = [name for name, on in switches if on]
    text = f"rotation {', '.join(fused) or 'none fused'}"
    text += f" ({_learning(rotation.learning)})" if rotation.learning else ""
    text += f"; online {', '.join(online)} in {rotation.online_dtype}" if online else ""
    return text + ("; embeddings centred" if rotation.center_embeddings else "")


def _learning(learning: RotationLearning) -> str:
    """How rotations are learned."""
    text = learning.text
    batch = f"{learning.batch_size} x {text.sequence_length} tokens of {text.samples} samples of {text.corpus}"
    momentum = f", momentum {learning.momentum:g}" if learning.momentum else ""
    rate = f"learning rate {learning.learning_rate:g} {learning.schedule}{momentum}"
    network = {"activations": "inputs and cache quantized", "all": "everything quantized"}[learning.network]
    gradient = ", gradient through the scales" if learning.gradient == "scales" else ""
    gradient += ", towards the float network's predictions" if learning.targets == "predictions" else ""
    return f"Cayley SGD, {learning.steps} steps of {batch}, {rate}{gradient}, {network}"


def _weights(weights: WeightQuantization) -> str:
    gptq = weights.gptq
    if gptq is None:
        method = "RTN"
    else:
        order = ", activation order" if gptq.act_order else ""
        groups = f", group scales {gptq.group_scales}" if weights.scheme.granularity == "group" else ""
        inputs = ", on quantized inputs" if gptq.hessian_inputs == "quantized" else ""
        method = f"GPTQ (block {gptq.block_size}, damping {gptq.damping:.0%}{order}{groups}{inputs})"
    clip = f", clip search in norm {weights.clip_norm:g}" if weights.clip_search else ""
    return f"{_scheme(weights.scheme)}, {method}{clip}"


def _scheme(scheme: QuantizationScheme) -> str:
    sort = "symmetric" if scheme.symmetric else "asymmetric"
    per = f"groups of {scheme.group_size}" if scheme.granularity == "group" else f"per {scheme.granularity}"
    clip = f", clip {scheme.clip_ratio:g}" if scheme.clip_ratio != 1 else ""
    return f"{scheme.bits}-bit {sort} {per}{clip}"


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

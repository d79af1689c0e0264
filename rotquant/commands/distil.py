"""`rotquant train-quantized`: self-distillation of one model, by one process or by several that torchrun starts."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from rotquant.commands.answers import CommandResult, answers
from rotquant.commands.models import cost_in_words
from rotquant.commands.options import (
    Changes,
    Checkpoint,
    Corpus,
    Device,
    Dtype,
    Seed,
    changed,
    corpus_spec,
    method_names,
    rotation_fields,
)
from rotquant.commands.outputs import Writes
from rotquant.foundation.errors import RecipeError, ResultError
from rotquant.foundation.files import canonical_json, check_output_folder, folder_size, short_hash, write_json
from rotquant.foundation.progress import silenced, task
from rotquant.models.folders import QUANTIZED
from rotquant.qat.method import SelfDistillation
from rotquant.recipes.presets import all_presets, preset
from rotquant.recipes.recipe import Recipe
from rotquant.tensors.devices import torch_device, torch_dtype
from rotquant.text import check_split

if TYPE_CHECKING:
    import torch

    from rotquant.metrics.cost import QuantizationCost
    from rotquant.qat.engine import Engine
    from rotquant.recipes.corpus import CorpusSpec
    from rotquant.training.state import Checkpoint as Kept
    from rotquant.weights.storage import StoredModel

#: The file of a trained folder with a record of each step.
HISTORY = "history.json"


@answers(
    {
        "model": "",
        "output": "the folder",
        "bytes": "of the folder",
        "method": "",
        "note": "where the rotation was changed to fit",
        "weights": "how many",
        "steps": "",
        "loss": "at the first and the last step",
        "tokens_per_second": "",
        "check": "what it costs on windows of the text; null where that was not measured",
        "seconds": "in all",
    }
)
def train_quantized(
    model: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write."), Writes(QUANTIZED, folder=True)],
    method: Annotated[
        str,
        typer.Option(
            autocompletion=method_names,
            help="What trains the whole model, for example rcp or bitdistiller-rotated.",
        ),
    ],
    corpus: Corpus,
    changes: Changes = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a training that was interrupted.")] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences that pass a GPU together: less memory, hardly other results. Default: all."
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
) -> CommandResult | None:
    """Train MODEL to be its own quantized student, and write the result as `rotquant quantize` does.

    Before it starts it reports memory and time, and it saves a checkpoint next to FOLDER. FOLDER gets the losses of
    all steps as `history.json`. Several GPUs share the work when torchrun starts the command, on one host or on several
    that see one file system:

    `torchrun --nproc-per-node 4 -m rotquant.cli train-quantized MODEL --method rcp -o FOLDER --corpus ...`

    Small models take fewer and larger steps than the papers': `rotquant train-quantized
    MODEL --method rcp --corpus TEXT -o trained --dtype float32 --set weights.scheme.granularity=channel
    --set weights.scheme.group_size=null --set methods.rcp.text.samples=128 --set methods.rcp.text.sequence_length=128
    --set methods.rcp.epochs=4 --set methods.rcp.weight_lr=3e-4 --set methods.rcp.quantizer_lr=1e-3 --set
    methods.rcp.schedule=cosine`
    """
    _settings(changed(preset(method), changes), method)
    check_output_folder(output, QUANTIZED)
    spec = corpus_spec(corpus)
    check_split(spec, "train")
    with task("starting"):
        from rotquant import api
        from rotquant.qat.engine import launched, processes

    short = changed(api.limits_of(model).shorten(preset(method)), changes)
    recipe, changed_to_fit = api.fit(model, short, rotation_fields(changes))
    settings = _settings(recipe, method)
    job = _Job(model, output, recipe, changed_to_fit, settings, spec, resume, batch_size, every, seed, dtype)
    if not launched():
        return job.run(torch_device(device))
    with processes(device) as own:
        return job.run(own)


def _settings(recipe: Recipe, method: str) -> SelfDistillation:
    """The method of a recipe that trains the whole model by self-distillation."""

    def trained(recipe: Recipe) -> SelfDistillation | None:
        return next((part for part in recipe.methods.values() if isinstance(part, SelfDistillation)), None)

    found = trained(recipe)
    if found is None:
        known = ", ".join(name for name, make in all_presets().items() if trained(make()))
        raise RecipeError(f"{method} does not train a whole model: take one of {known}, or `rotquant quantize`.")
    return found


@dataclass(frozen=True)
class _Job:
    """The command's arguments, the same in every process."""

    model: str
    output: Path
    recipe: Recipe
    changed: str
    settings: SelfDistillation
    spec: "CorpusSpec"
    resume: bool
    batch_size: int | None
    every: int
    seed: int
    dtype: str

    def run(self, device: "torch.device") -> CommandResult | None:
        """Run the training in one process; the first one writes the result and answers."""
        from rotquant import api
        from rotquant.models.checkpoints import config_of
        from rotquant.qat.engine import make_engine
        from rotquant.qat.estimate import estimate

        engine, dtype, started = make_engine(device, self.batch_size), torch_dtype(self.dtype), time.perf_counter()
        with silenced(engine.rank > 0):
            engine.check_batch(self.settings.batch_size)
            config = config_of(self.model)
            needed = estimate(config, self.recipe, self.settings, device, dtype, engine.processes, self.batch_size)
            if engine.rank == 0:
                if self.changed:
                    typer.echo(f"note: {self.changed}")
                typer.echo(str(needed))
            needed.check()
            kept = self._checkpoint()
            _check_unfinished(kept, engine, self.resume)
            trained = api.quantize(
                self.model,
                self.recipe,
                corpus=self.spec,
                seed=self.seed,
                device=device,
                dtype=dtype,
                batch_size=self.batch_size,
                training=kept,
                check=api.check_metric(Path(self.model), self.spec) if engine.processes == 1 else None,
            )
            if engine.rank:
                return None
            cost = trained.cost(device)
            trained.save(self.output)
            stored = cast("StoredModel", trained.stored)
            write_json(self.output / HISTORY, stored.history)
            shutil.rmtree(kept.path.parent)
            return self._answer(stored, time.perf_counter() - started, cost)

    def _checkpoint(self) -> "Kept":
        from rotquant.models.digests import checkpoint_digest
        from rotquant.training.state import Checkpoint as Kept

        text = self.spec.model_dump(mode="json")
        about = [self.recipe.model_dump(mode="json"), text, checkpoint_digest(self.model), self.seed, self.dtype]
        place = self.output.with_name(f"{self.output.name}.unfinished") / "training"
        return Kept(place, short_hash(canonical_json(about)), every=self.every)

    def _answer(self, stored: "StoredModel", seconds: float, cost: "QuantizationCost | None") -> CommandResult:
        losses, size = [step["loss"] for step in stored.history], folder_size(self.output)
        tokens = len(losses) * self.settings.batch_size * self.settings.text.sequence_length
        rate, weights = tokens / stored.seconds[self.settings.title], len(stored.weights)
        said = (
            f"{self.settings.title}: {weights} weights trained and quantized, loss {losses[0]:.3f} at the first and "
            f"{losses[-1]:.3f} at the last of {len(losses)} steps, {rate:,.0f} tokens/s, {seconds:.0f} s in all; "
            f"{self.output}, {size / 2**20:.1f} MiB"
        )
        data = {"model": self.model, "output": str(self.output), "bytes": size, "method": self.settings.name}
        data |= {"note": self.changed, "weights": weights, "steps": len(losses), "loss": [losses[0], losses[-1]]}
        data |= {"tokens_per_second": rate, "seconds": seconds, "check": cost and cost.as_data()}
        advice = "train with more steps or text, or with more bits."
        return CommandResult(data, (said, *([] if cost is None else cost_in_words(cost, advice))))


def _check_unfinished(kept: "Kept", engine: "Engine", resume: bool) -> None:
    """Neither begin anew where a training waits to be continued, nor continue what is not there."""
    from rotquant.qat.engine import ShardedCheckpoint

    place, of_one, of_several = kept.path.parent, kept.path, ShardedCheckpoint(kept, engine.processes, engine.rank).path
    own, other, whose = (
        (of_several, of_one, "one process") if engine.processes > 1 else (of_one, of_several, "several processes")
    )
    if other.exists():
        raise ResultError(f"{place} holds a training of {whose}: start as many as it had, or delete it to begin anew.")
    if own.exists() and not resume:
        raise ResultError(f"{place} holds a training that was interrupted: pass --resume, or delete it to begin anew.")
    if resume and not own.exists():
        raise ResultError(f"{place} holds no training to resume: leave --resume out to begin one.")

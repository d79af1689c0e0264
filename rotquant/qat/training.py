"""Quantization-aware training of a whole model by self-distillation (RCP Secs. 4 and 5.1; BitDistiller, Sec. 3.3).

The student is the rotated model with quantizers for weights, activations and KV cache, the teacher the same model
without. All parameters of the student are trained, with rounding straight-through, to bring its distribution of every
next token to the teacher's (`qat.loss`). Afterwards weights are frozen as codes and tables.
"""

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rotquant.foundation.progress import track
from rotquant.models.architectures import Architecture, architecture_of, decoder_layers, linear_of, lm_head, logit_cap
from rotquant.models.limits import ModelLimits
from rotquant.models.masks import kept_masks
from rotquant.models.memory import KEPT_BYTES, kept_bytes
from rotquant.models.rotation.matrices import initial_rotations
from rotquant.models.simulation.runtime import RuntimeQuantization, wrap
from rotquant.models.stream import on_device
from rotquant.qat.engine import Engine, ShardedCheckpoint, make_engine
from rotquant.qat.estimate import estimate
from rotquant.qat.loss import label_probabilities, largest_probabilities
from rotquant.qat.method import SelfDistillation
from rotquant.qat.quantizers import TrainableQuantizer, make_quantizer
from rotquant.qat.start import Clips, clip_weight, own_rounding, search_clips, uniform_rounding
from rotquant.qat.steps import TOKENS_AT_ONCE, BestParameters, OptimizerStep
from rotquant.qat.student import (
    Distillation,
    Factorized,
    linears_of,
    parameter_groups,
    quantized_linears,
    teacher_states,
)
from rotquant.qat.writing import write, written_once
from rotquant.recipes.recipe import Recipe
from rotquant.recipes.schemes import RotationScheme
from rotquant.tensors.codebook_compression import in_float16
from rotquant.tensors.devices import of_device
from rotquant.tensors.faster import FasterKernels
from rotquant.training import loop
from rotquant.training.state import Checkpoint, Record
from rotquant.weights.context import QuantizationContext
from rotquant.weights.hessian import observed_hessians

#: Bytes of the teacher's states that are kept from one epoch to the next; more are computed anew in every step.
_STATE_BYTES = {"cpu": 2**29, "cuda": 2**33}

Quantizers = dict[tuple[int, str], TrainableQuantizer]


def check_model(settings: SelfDistillation, recipe: Recipe, architecture: Architecture, limits: ModelLimits) -> None:
    """The text fits the context."""
    limits.check_length(settings.text.sequence_length, f"texts that {settings.title} trains on")


def apply(settings: SelfDistillation, context: QuantizationContext) -> None:
    """Train the context's model, put its quantized weights into it, and keep their codes, tables and the history.

    Raises:
        RotquantError: the loss or its gradient is not finite.
        ResultError: the checkpoint belongs to another training, is damaged or cannot be written.
    """
    engine = make_engine(context.device, context.batch_size)
    if context.device.type == "cuda":
        model, sharing = context.model, (engine.processes, engine.at_once)
        way = estimate(model.config, context.recipe, settings, context.device, model.dtype, *sharing)
        engine.at_once, engine.offloads = way.at_once, way.offloaded
    training = Training(context, settings, engine)
    context.history = training.run()
    context.kept_elsewhere = training.engine.rank != 0
    if not context.kept_elsewhere:
        training.freeze()


@dataclass(frozen=True)
class TeacherOutputs:
    """Outputs of the teacher that are known before the first step.

    confidence: its mean probability of the tokens of the text. states: its last hidden states of all samples, [samples,
        tokens, hidden], where they are few.
    """

    confidence: float
    states: Tensor | None


class Training:
    """State of a training of a context's model, in place.

    The student computes in float32 at least (with gradients and AdamW's moments 16 bytes a parameter), or on a GPU and
    for a model of 16 bits in bfloat16 from such parameters. `qat.estimate` has the budget of memory.
    """

    def __init__(self, context: QuantizationContext, settings: SelfDistillation, engine: Engine) -> None:
        self.context = context
        self.settings = settings
        self.engine = engine
        self.model: nn.Module = context.model
        self.recipe: Recipe = context.recipe
        self.chosen = settings.quantizer_settings(context.recipe)
        self.ids, self.validation = self._split(context.texts[settings.name])
        self.dtype = cast(torch.dtype, context.model.dtype)
        self.quantizers: Quantizers = {}

    def run(self) -> list[Record]:
        """Train from the start or from the context's checkpoint; the records of the steps."""
        self.engine.check_batch(self.settings.batch_size)
        teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.ids, self.validation = self._split(self._written(teacher, self.context.texts[self.settings.name]))
        checkpoint = self.engine.checkpoint(self.context.checkpoint)
        self._begin(checkpoint is not None and checkpoint.path.exists())
        self.model.to(torch.promote_types(self.dtype, torch.float32))
        student = self.engine.student(self.model)
        with (
            wrap(teacher, self.context.online),
            wrap(student, RuntimeQuantization(tensors=self.context.online.tensors, **self.recipe.runtime)),
            self._factorization(student) as factorized,
            quantized_linears(student, self.quantizers, factorized),
        ):
            distillation = Distillation(student, teacher, 0.5, factorized)
            with self.engine.placed(distillation):
                outputs = self._teacher_outputs(teacher, checkpoint)
                distillation.confidence = outputs.confidence
                with self.engine.stepping(teacher):
                    history = self._train(distillation, outputs.states, checkpoint)
                self.engine.gather(student, self.model)
        return history

    def _split(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [n, tokens] that are trained on, and the first ones, that are not."""
        count = self.settings.validated
        return ids[count:], ids[:count]

    def _written(self, teacher: nn.Module, ids: Tensor) -> Tensor:
        """The text in the teacher's own words, where the settings say so: of the samples the first tokens stay.

        The same seed writes the same text on one kind of machine. Processes that train together all write it, and take
        the first one's.
        """
        settings, seed = self.settings, self.context.seed + self.settings.text.seed
        if settings.temperature is None:
            return ids
        prompts, length = ids[:, : settings.prompt], ids.shape[1]
        digest = hashlib.sha256(prompts.contiguous().numpy().tobytes()).hexdigest()
        about = self.recipe.rotation, digest, length, settings.temperature, seed

        def make() -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            with on_device(teacher, self.engine.device), wrap(teacher, self.context.online), FasterKernels():
                return write(
                    teacher,
                    prompts,
                    length,
                    generator,
                    temperature=cast(float, settings.temperature),
                    title=settings.title,
                )

        return self.engine.same(written_once(teacher, self.engine.device, about, make))

    def _begin(self, resumed: bool) -> None:
        """Make the quantizers, and clip weights whose quantizers do not learn it, by a search on the text's beginning.

        A checkpoint has both already.
        """
        if resumed:
            for index, name, layer in linears_of(self.model):
                self.quantizers[index, name] = self._quantizer(layer.weight.detach().to(self.engine.device), None)
            return
        context, architecture = self.context, self.context.architecture
        with wrap(context.model, context.online):
            stream = context.capture(self.ids[: self.settings.start_samples])
            title = f"{self.settings.title}: where clips begin"
            observe = partial(observed_hessians, architecture=architecture)
            for index, layer, hessians in stream.observed_layers(title, observe):
                for site in architecture.sites:
                    for name in site.linears:
                        self._start(index, name, linear_of(layer, name), hessians[name].matrix)

    @torch.no_grad()
    def _start(self, index: int, name: str, layer: nn.Linear, moment: Tensor) -> None:
        """Initial quantizer of one linear layer with inputs of X^T X `moment`."""
        chosen, bits = self.chosen, self.recipe.rounded.scheme.bits
        rounding = own_rounding(chosen.kind, bits) if chosen.start_rounding == "own" else uniform_rounding(bits)
        size = self._group_size(layer.weight)
        clips = (
            None
            if name.endswith(chosen.unsearched)
            else search_clips(layer.weight, moment, size, rounding, target=chosen.start_target)
        )
        quantizer = self._quantizer(layer.weight.detach(), clips)
        if clips is not None and not any(True for _ in quantizer.parameters()):
            layer.weight.copy_(clip_weight(layer.weight, clips, size))
        self.quantizers[index, name] = quantizer

    def _quantizer(self, weight: Tensor, clips: Clips | None) -> TrainableQuantizer:
        chosen, bits = self.chosen, self.recipe.rounded.scheme.bits
        quantizer = make_quantizer(chosen.kind, weight, self._group_size(weight), bits, clips, chosen.straight_through)
        for name, parameter in quantizer.named_parameters():
            parameter.requires_grad_(name not in chosen.fixed)
        return quantizer

    def _group_size(self, weight: Tensor) -> int:
        return self.recipe.rounded.scheme.group_size or weight.shape[1]

    @contextmanager
    def _factorization(self, student: nn.Module) -> Iterator[Factorized | None]:
        """While open, R1 stands next to the student's weights, where the settings say so."""
        if not self.settings.factorized:
            yield None
            return
        scheme = cast(RotationScheme, self.recipe.rotation)
        residual = initial_rotations(architecture_of(student), scheme, self.context.seed).residual
        factorized = Factorized(student, cast(Tensor, residual).to(self.engine.device))
        factorized.turn_back()
        yield factorized
        Factorized(self.model, factorized.residual).turn()

    def _teacher_outputs(self, teacher: nn.Module, checkpoint: Checkpoint | ShardedCheckpoint | None) -> TeacherOutputs:
        """The teacher's confidence, from the settings, a checkpoint or the text; its states, where they are few."""
        found = torch.zeros((), dtype=torch.float64)
        known = checkpoint and checkpoint.of("confidence")
        given = self.settings.confidence
        if not isinstance(given, str):
            found.fill_(given)
        ready = not isinstance(given, str) or (known is not None and known.load({"confidence": found})[0] > 0)
        head = lm_head(teacher).weight
        size = self.ids.numel() * head.shape[1] * head.element_size()
        kept = self.engine.processes == 1 and size <= of_device(_STATE_BYTES, self.engine.device)
        if ready and not kept:
            return TeacherOutputs(found.item(), None)
        total, states = self._taught(teacher, head, kept)
        if not ready:
            found.copy_(total / (self.ids.shape[0] * (self.ids.shape[1] - 1)))
            if known is not None:
                known.save(1, {"confidence": found}, [])
        return TeacherOutputs(found.item(), states)

    def _taught(self, teacher: nn.Module, head: Tensor, kept: bool) -> tuple[Tensor, Tensor | None]:
        """The sum of the teacher's probabilities that its confidence is the mean of, of all tokens but the last; its
        states where they are to be kept."""
        device, states = self.engine.device, []
        at_once = max(1, of_device(TOKENS_AT_ONCE, device) // self.ids.shape[1])
        total = torch.zeros((), dtype=torch.float64, device=device)
        own = self.engine.own(self.ids)
        most = -(-len(self.ids) // self.engine.processes)  # passes are taken together: who has fewer repeats some
        counted = torch.arange(most) < len(own)
        rows = torch.arange(most).clamp(max=len(own) - 1).split(at_once)
        for part in track(rows, f"{self.settings.title}: the teacher's confidence", "batch"):
            ids = own[part].to(device)
            hidden = teacher_states(teacher, ids)
            largest = self.settings.confidence == "largest"
            cap = logit_cap(teacher)
            values = (
                largest_probabilities(hidden, head, cap=cap)
                if largest
                else label_probabilities(hidden, head, ids, cap=cap)
            )
            found = values.sum(1, dtype=torch.float64)
            total += (found * counted[: len(part)].to(found)).sum()
            counted = counted[len(part) :]
            if kept:
                states.append(hidden)
        return self.engine.total(total), torch.cat(states) if kept else None

    def _train(self, distillation: Distillation, states: Tensor | None, checkpoint: Any) -> list[Record]:
        settings, model = self.settings, distillation.student
        weights, learned = parameter_groups(model)
        rates = dict(self.settings.budget(self.recipe).rates)
        groups = [{"params": weights, "lr": rates["weight_lr"]}]
        if learned:
            groups.append({"params": learned, "lr": rates["quantizer_lr"]})
        optimizer = self.engine.optimizer(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share, settings))
        best = BestParameters(model) if settings.validated else None
        seed = self.context.seed + settings.text.seed
        texts = self.ids, self.validation
        trained = optimizer, schedule, weights, learned
        step = OptimizerStep(settings, self.engine, seed, *texts, self.quantizers, distillation, states, *trained, best)
        tokens = min(len(self.engine.own(step.batches[0])), self.engine.at_once or len(self.ids)) * self.ids.shape[1]
        again = kept_bytes(model, tokens) > of_device(KEPT_BYTES, self.engine.device)
        masks = kept_masks(model, distillation.teacher)
        with loop.recomputed(model, again), masks, step.replay:
            history = loop.train(
                step,
                settings.steps,
                settings.title,
                parts={
                    **self.engine.parts(model, optimizer),
                    "schedule": schedule,
                    **({} if best is None else {"best": best}),
                },
                checkpoint=checkpoint,
                not_finite=f"the loss of {settings.title} or its gradient is {{loss}} at step {{step}}: lower "
                f"{' or '.join(f'methods.{settings.name}.{name}' for name in rates)}; the last checkpoint is kept.",
            )
        if best is not None:
            best.restore()
        return history

    @torch.no_grad()
    def freeze(self) -> None:
        """Bring the model back to its type, with the values of codes and float16 tables, which the context keeps."""
        device = self.engine.device
        frozen = {
            (index, name): in_float16(self.quantizers[index, name].freeze(layer.weight.to(device))).to("cpu")
            for index, name, layer in linears_of(self.model)
        }
        self.model.to(self.dtype)
        for index, layer in enumerate(decoder_layers(self.model)):
            for site in self.context.architecture.sites:
                self.context.store(index, layer, site, [frozen[index, name] for name in site.linears])


def _share(settings: SelfDistillation, step: int) -> float:
    """The share of the learning rates at a step."""
    return 1.0 if settings.schedule == "constant" else (1 + math.cos(math.pi * step / settings.steps)) / 2

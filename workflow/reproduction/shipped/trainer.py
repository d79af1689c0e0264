"""Training of a stand-in: AdamW, warm-up and cosine, bf16 autocast over float32 weights, exact resume.

Every random choice depends only on (seed, step), so an interrupted training continues exactly. Nothing here changes the
loss or the weights to create outliers: they result from training alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from reproduction.shipped.data import TrainingData, prepare_data
from reproduction.shipped.recipe import TrainingConfig, card
from rotquant.foundation.files import atomic_directory, canonical_json, short_hash, write_json, write_text
from rotquant.text import Tokens, evaluation_windows
from rotquant.training.loop import GradientStep, train
from rotquant.training.state import Checkpoint, Record

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_ATTENTION = "rotquant_causal"
"""An attention name for which transformers makes no mask: a mask would prevent flash attention in a captured step."""


def train_model(
    config: TrainingConfig,
    output_dir: str | Path,
    device: str = "cpu",
    *,
    data_dir: str | Path | None = None,
    compile: bool = False,
    stop_after: int | None = None,
) -> dict[str, Any] | None:
    """Train a model and write it to `output_dir` as a Hugging Face folder; return its curve and final figures.

    The folder holds bf16 safetensors, config.json, the tokenizer, curve.json, recipe.json and MODEL_CARD.md. Progress
    is saved in `<output_dir>.state.safetensors`, from which the same recipe resumes.

    Args:
        config: the recipe.
        output_dir: the folder to write, replaced only when training is complete.
        device: "cpu" or "cuda".
        data_dir: folder of the tokenizer and the encoded text, built when absent; by default the user's cache.
        compile: compile the model and, on a GPU, replay each step as one CUDA graph. Faster; other summation order.
        stop_after: stop at this step, keep the resume file and return None (a deliberate interruption).

    Raises:
        CorpusError: the corpus cannot be read.
        ResultError: the resume file belongs to another recipe or is damaged.
        RotquantError: the loss is not finite.
    """
    data = prepare_data(config, data_dir)
    output_dir = Path(output_dir)
    trainer = Trainer(config, data, device, compile=compile)
    state_file = output_dir.with_name(output_dir.name + ".state.safetensors")
    if not trainer.run(state_file, stop_after):
        return None
    curve = trainer.curve()
    purpose = f"trained from scratch by this project on the corpus {config.corpus.name}"
    with atomic_directory(output_dir) as folder:
        _save(trainer.model, data.tokenizer, config.sequence_length, folder)
        write_json(folder / "recipe.json", config.model_dump(mode="json"))
        write_json(folder / "curve.json", curve)
        write_text(folder / "MODEL_CARD.md", card(config.name, purpose, "training"))
    state_file.unlink(missing_ok=True)
    return curve


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, trained_length: int, folder: Path) -> None:
    """Write a bf16 copy of the model and its tokenizer, which records the trained length, as a Hugging Face folder."""
    tokenizer.model_max_length = trained_length
    model.eval().to(torch.bfloat16)  # pyright: ignore[reportArgumentType]  # transformers wraps torch's
    model.save_pretrained(folder, max_shard_size="1GB")
    tokenizer.save_pretrained(folder)


def build_model(config: TrainingConfig) -> PreTrainedModel:
    """Return the float32 model with its initial weights, which depend on the seed alone; global RNG state is kept."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = config.model.model_dump(exclude={"model_type", "rope_theta"})
    if config.model.model_type == "phi3":  # Its configuration derives head_dim; the original length defaults to 4096.
        shape["original_max_position_embeddings"] = shape["max_position_embeddings"]
        del shape["head_dim"]
    settings = AutoConfig.for_model(
        config.model.model_type,
        **shape,
        vocab_size=config.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": config.model.rope_theta},
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        use_cache=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


class Trainer:
    """One training: model, optimizer and data on a device, and its steps."""

    def __init__(self, config: TrainingConfig, data: TrainingData, device: str, *, compile: bool) -> None:
        self.config, self.provenance = config, data.provenance
        self.device = torch.device(device)
        self.model = build_model(config).to(self.device)  # pyright: ignore[reportArgumentType]  # transformers wraps torch's
        self.bos = cast(int, data.tokenizer.bos_token_id)
        self.train_ids = torch.from_numpy(data.train.astype("int32")).to(self.device)
        self.validation = self._validation_windows(data.validation)
        on_gpu = self.device.type == "cuda"
        self.rate = torch.zeros((), device=self.device) if on_gpu else 0.0
        self.optimizer = torch.optim.AdamW(
            self._parameter_groups(),
            lr=self.rate,
            betas=config.adam_betas,
            eps=config.adam_eps,
            fused=on_gpu or None,
            capturable=on_gpu,
        )
        self.loss_sum = torch.zeros((), device=self.device)
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = _cross_entropy
        if compile:
            self._compile()
        self.gradient = GradientStep(
            lambda step: [self.draw_batch(step)], self._loss, [self.optimizer], clip=self._clip
        )
        self.captured: dict[torch.Size, _Captured] = {}
        self.use_graph = compile and on_gpu
        self.clock = _Clock()
        self.history: list[Record] = []

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups with weight decay for matrices, and for norm scales only if the recipe sets it."""
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        scales = [p for p in self.model.parameters() if p.dim() <= 1]
        decay = self.config.weight_decay
        return [
            {"params": matrices, "weight_decay": decay},
            {"params": scales, "weight_decay": decay if self.config.decay_norms else 0.0},
        ]

    def _validation_windows(self, ids: Any) -> Tensor:
        """Held-out windows by the perplexity protocol: one BOS at the head of the text, then no overlap, no tail."""
        text = Tokens(torch.from_numpy(ids.astype("int64")), self.bos)
        return evaluation_windows(text, self.config.sequence_length)[: self.config.validation_windows].to(self.device)

    def _compile(self) -> None:
        """Compile one decoder layer, whose code all layers share, and the loss: seconds instead of minutes."""
        AttentionInterface.register(_ATTENTION, sdpa_attention_forward)
        self.model.set_attn_implementation(_ATTENTION)
        for layer in self.model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile(dynamic=False)
        self.cross_entropy = torch.compile(_cross_entropy, dynamic=False)

    def _loss(self, batch: Tensor) -> Tensor:
        """Mean next-token cross-entropy in float32 of ids [samples, length + 1]."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16"):
            logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
            return self.cross_entropy(logits, batch[:, 1:])

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)

    def draw_batch(self, step: int) -> Tensor:
        """The samples of one step, ids [samples, length + 1]; they depend only on (seed, step)."""
        samples, length = self.config.samples_at(step)
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        last = self.train_ids.numel() - length - 1
        starts = torch.randint(last + 1, (samples, 1), generator=generator)
        headed = torch.rand(samples, generator=generator) < self.config.bos_fraction
        starts, headed = starts.to(self.device, non_blocking=True), headed.to(self.device, non_blocking=True)
        batch = self.train_ids[starts + torch.arange(length + 1, device=self.device)].long()
        batch[:, 0] = torch.where(headed, self.bos, batch[:, 0])
        return batch

    def step(self, step: int) -> Record:
        """Do one step; at some steps, record the mean loss since the last record, and validation perplexity."""
        config, done = self.config, step + 1
        self._set_rate(config.learning_rate_at(step))
        batch = self.draw_batch(step)
        if not self.use_graph:
            self._update(batch)
        elif (captured := self.captured.get(batch.shape)) is None:
            self.captured[batch.shape] = self._capture(batch)
        else:
            captured.batch.copy_(batch)
            captured.graph.replay()
        record = {}
        if done % config.log_every == 0:  # the only place where a step waits for the device
            record["loss"] = round(self.loss_sum.item() / config.log_every, 4)
            self.loss_sum.zero_()
        if done % config.validate_every == 0 or done == config.steps:
            record["perplexity"] = self.validate()
        return record

    def _set_rate(self, rate: float) -> None:
        """Set the learning rate in place, where a captured graph reads it."""
        self.rate = self.rate.fill_(rate) if isinstance(self.rate, Tensor) else rate
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate

    def _update(self, batch: Tensor) -> None:
        """Update the weights with the gradient of a batch."""
        (values,) = self.gradient.accumulate([batch])
        self.gradient.apply()
        self.loss_sum += values["loss"]

    def _capture(self, batch: Tensor) -> _Captured:
        """Do one step outside a graph on a side stream (this compiles), then capture the step that is replayed."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._update(batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        # A separate stream: cuBLAS has one workspace per stream, which graphs that replay concurrently must not share.
        with torch.cuda.graph(graph, stream=side):
            self._update(batch)
        return _Captured(batch, graph)

    def run(self, state_file: Path, stop_after: int | None) -> bool:
        """Train to the recipe's last step or `stop_after`, with logging, validation and saving; whether it is done.

        Raises:
            ResultError: the resume file belongs to another recipe.
            RotquantError: the loss is not finite.
        """
        config = self.config
        identity = short_hash(canonical_json(config.model_dump(mode="json")))
        self.clock = _Clock()
        self.history = train(
            self.step,
            min(config.steps, stop_after or config.steps),
            f"training {config.name}",
            parts={"model": self.model, "optimizer": self.optimizer, "loss_sum": self.loss_sum, "clock": self.clock},
            checkpoint=Checkpoint(state_file, identity, every=None, seconds=config.checkpoint_minutes * 60),
            noted={"loss": ".3f", "perplexity": ".2f"},
        )
        return (stop_after or config.steps) >= config.steps

    def validate(self) -> float:
        """Perplexity on the held-out windows."""
        total = 0.0
        with torch.no_grad():
            for windows in self.validation.split(self.config.batch_size):
                total += self._loss(windows).item() * len(windows)
        return math.exp(total / len(self.validation))

    def curve(self) -> dict[str, Any]:
        """The record of a finished training: loss and validation perplexity by step, data, time and hardware."""
        steps, perplexities = self.config.steps, self._by_step("perplexity")
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": steps,
            "tokens": self.config.tokens,
            "train_tokens_available": self.train_ids.numel(),
            "seconds": round(self.clock.seconds, 1),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "data": self.provenance,
            "validation_perplexity": perplexities[-1][1],
            "loss_by_step": self._by_step("loss"),
            "validation_perplexity_by_step": perplexities,
        }

    def _by_step(self, name: str) -> list[tuple[int, float]]:
        """A recorded value as (steps done, value) pairs."""
        return [(record["step"] + 1, record[name]) for record in self.history if name in record]


@dataclass
class _Captured:
    """A captured step and the batch that it reads."""

    batch: Tensor
    graph: torch.cuda.CUDAGraph


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over tokens in float32; a separate function, which reads the logits once when compiled."""
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class _Clock:
    """Seconds that a training has taken, in this process and earlier ones."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.began = time.monotonic() - state["seconds"]

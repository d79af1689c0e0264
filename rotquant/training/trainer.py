"""The training loop: AdamW, warm-up and cosine, bf16 autocast over float32 weights, exact resume.

Every random choice depends on (seed, step) alone, so an interrupted training continues exactly. Nothing here changes
the loss or the weights to make a phenomenon appear: outliers are what training made of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotquant.foundation.errors import ConfigError
from rotquant.foundation.files import atomic_path, canonical_json
from rotquant.foundation.progress import task
from rotquant.training.data import TrainingData
from rotquant.training.recipe import TrainingConfig

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def build_model(config: TrainingConfig) -> PreTrainedModel:
    """Return the float32 model with its initial weights, which depend on the seed alone; global RNG state is kept."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = config.model.model_dump(exclude={"model_type", "rope_theta"})
    if config.model.model_type == "phi3":  # Its configuration derives the one and defaults the other to 4096.
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
    """The state of one training: model, optimizer, step and the curve so far."""

    def __init__(self, config: TrainingConfig, data: TrainingData, device: str, *, compile: bool) -> None:
        import torch

        self.config, self.provenance = config, data.provenance
        self.device = torch.device(device)
        self.model = build_model(config).to(self.device)
        self.bos = int(data.tokenizer.bos_token_id)
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
        self.batch = torch.zeros(config.batch_size, config.sequence_length + 1, dtype=torch.long, device=self.device)
        self.loss: Callable[[torch.Tensor], torch.Tensor] = torch.compile(self._loss) if compile else self._loss
        self.graph: torch.cuda.CUDAGraph | None = None
        self.use_graph = compile and on_gpu
        self.step = 0
        self.seconds = 0.0
        self.losses: list[tuple[int, float]] = []
        self.perplexities: list[tuple[int, float]] = []

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices decay; norm scales only when the recipe says so."""
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        scales = [p for p in self.model.parameters() if p.dim() <= 1]
        decay = self.config.weight_decay
        return [
            {"params": matrices, "weight_decay": decay},
            {"params": scales, "weight_decay": decay if self.config.decay_norms else 0.0},
        ]

    def _validation_windows(self, ids: Any) -> torch.Tensor:
        """Held-out windows by the perplexity protocol: one BOS at the head of the text, then no overlap, no tail."""
        import torch

        from rotquant.text import Tokens, evaluation_windows

        text = Tokens(torch.from_numpy(ids.astype("int64")), self.bos)
        return evaluation_windows(text, self.config.sequence_length)[: self.config.validation_windows].to(self.device)

    def _autocast(self) -> Any:
        import torch

        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16")

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross-entropy in float32 of ids [batch, sequence_length + 1]."""
        import torch

        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def draw_batch(self, step: int) -> torch.Tensor:
        """The samples of one step, ids [batch, sequence_length + 1]; they depend on (seed, step) alone."""
        import torch

        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        last = self.train_ids.numel() - config.sequence_length - 1
        starts = torch.randint(last + 1, (config.batch_size, 1), generator=generator)
        headed = torch.rand(config.batch_size, generator=generator) < config.bos_fraction
        starts, headed = starts.to(self.device, non_blocking=True), headed.to(self.device, non_blocking=True)
        batch = self.train_ids[starts + torch.arange(config.sequence_length + 1, device=self.device)].long()
        batch[:, 0] = torch.where(headed, self.bos, batch[:, 0])
        return batch

    def _update(self) -> None:
        """One optimizer step on `self.batch`."""
        import torch

        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self.loss(self.batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.gradient_clip)
        self.optimizer.step()
        self.loss_sum += loss.detach()

    def _train_step(self) -> None:
        import torch

        rate = self.config.learning_rate_at(self.step)
        self.batch.copy_(self.draw_batch(self.step))
        if isinstance(self.rate, torch.Tensor):
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        if not self.use_graph:
            self._update()
        elif self.graph is None:
            self._capture()
        else:
            self.graph.replay()
        self.step += 1

    def _capture(self) -> None:
        """Do one step outside a graph on a side stream (this compiles), then record the step that later ones replay."""
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._update()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self._update()

    def run(self, state_file: Path, stop_after: int | None) -> None:
        """Train to the recipe's last step (or `stop_after`), logging, validating and saving on the way."""
        config = self.config
        end = min(config.steps, stop_after or config.steps)
        began, saved = time.monotonic() - self.seconds, time.monotonic()
        with task(f"training {config.name}", "step", end, self.step) as under_way:
            while self.step < end:
                self._train_step()
                if self.step % config.log_every == 0:
                    self._log()
                if self.step % config.validate_every == 0 or self.step == config.steps:
                    self.perplexities.append((self.step, self.validate()))
                if time.monotonic() - saved > config.checkpoint_minutes * 60:
                    self.seconds, saved = time.monotonic() - began, time.monotonic()
                    self.save_state(state_file)
                under_way.advance(note=self._last_values())
        self.seconds = time.monotonic() - began
        if self.step < config.steps:
            self.save_state(state_file)

    def _last_values(self) -> str:
        """The latest loss and validation perplexity, for the progress shown."""
        loss = f"loss {self.losses[-1][1]:.3f}" if self.losses else ""
        perplexity = f"perplexity {self.perplexities[-1][1]:.2f}" if self.perplexities else ""
        return ", ".join(filter(None, [loss, perplexity]))

    def _log(self) -> None:
        """Add the mean loss since the last log to the curve; the only place where the step waits for the device."""
        mean = self.loss_sum.item() / self.config.log_every
        self.loss_sum.zero_()
        self.losses.append((self.step, round(mean, 4)))

    def validate(self) -> float:
        """Perplexity on the held-out windows."""
        import torch

        total = 0.0
        with torch.no_grad(), self._autocast():
            for windows in self.validation.split(32):
                total += self._loss(windows).item() * len(windows)
        return math.exp(total / len(self.validation))

    def save_state(self, file: Path) -> None:
        """Write everything that a continued training needs."""
        import torch

        state = {
            "recipe": canonical_json(self.config.model_dump(mode="json")),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loss_sum": self.loss_sum,
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "perplexities": self.perplexities,
        }
        with atomic_path(file) as temporary:
            torch.save(state, temporary)

    def resume(self, file: Path) -> None:
        """Continue from a resume file if there is one.

        Raises:
            ConfigError: it belongs to another recipe.
        """
        import torch

        if not file.is_file():
            return
        state = torch.load(file, map_location=self.device, weights_only=True)
        if state["recipe"] != canonical_json(self.config.model_dump(mode="json")):
            raise ConfigError(f"Resume file {file} was written by another recipe; delete it to train from the start.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.loss_sum.copy_(state["loss_sum"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.losses = [tuple(point) for point in state["losses"]]
        self.perplexities = [tuple(point) for point in state["perplexities"]]

    def curve(self) -> dict[str, Any]:
        """The training's record: loss and validation perplexity by step, data, time and hardware."""
        import torch

        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": self.step,
            "tokens": self.step * self.config.batch_size * self.config.sequence_length,
            "train_tokens_available": self.train_ids.numel(),
            "seconds": round(self.seconds, 1),
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "data": self.provenance,
            "validation_perplexity": self.perplexities[-1][1] if self.perplexities else None,
            "loss_by_step": self.losses,
            "validation_perplexity_by_step": self.perplexities,
        }

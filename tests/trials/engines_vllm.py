"""Run by the Python of vLLM's environment: log-probabilities of windows' tokens by vLLM, or its speed.

Arguments: a model's folder, the type to compute in, more options of `LLM` as JSON, and for the speed a file that is
locked until this process may have the machine to itself. Standard input: windows of token ids; or the numbers of
`requests` at once, and how many tokens each has `given` and `generated`. The last line of standard output: the
log-probability of each window's tokens after the first, all in one list; or generated tokens a second for each number.
"""

import fcntl
import json
import sys
import time

from vllm import LLM, SamplingParams

#: Of a comparison on a CPU.
OPTIONS = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.1,
}


def log_probabilities(model: LLM, windows: list[list[int]]) -> list[float]:
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = model.generate([{"prompt_token_ids": window} for window in windows], asked)
    return [
        step[token].logprob
        for window, answer in zip(windows, answers, strict=True)
        for step, token in zip(answer.prompt_logprobs[1:], window[1:], strict=True)
    ]


def speeds(model: LLM, requests: list[int], given: int, generated: int) -> list[float]:
    """Generated tokens a second at numbers of requests: the best of three, after one that warms up."""
    asked = SamplingParams(temperature=0, max_tokens=generated, ignore_eos=True, detokenize=False)

    def seconds(number: int, shift: int) -> float:
        prompts = [{"prompt_token_ids": list(range(shift + one, shift + one + given))} for one in range(number)]
        started = time.perf_counter()
        model.generate(prompts, asked, use_tqdm=False)
        return time.perf_counter() - started

    return [number * generated / min(seconds(number, 100 * shift) for shift in range(4)) for number in requests]


if __name__ == "__main__":
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    asked = json.load(sys.stdin)
    model = LLM(sys.argv[1], dtype=sys.argv[2], **OPTIONS | options)
    if len(sys.argv) > 4:
        print("ready", flush=True)
        with open(sys.argv[4]) as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            print(json.dumps(speeds(model, **asked)))
    else:
        print(json.dumps(log_probabilities(model, asked)))

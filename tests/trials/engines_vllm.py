"""Run by the Python of vLLM's environment: log-probabilities of windows' tokens by vLLM on a CPU.

Arguments: a model's folder, the type to compute in. Standard input: windows of token ids. The last line of standard
output: the log-probability of each window's tokens after the first, all in one list.
"""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    windows = json.load(sys.stdin)
    model = LLM(
        sys.argv[1],
        dtype=sys.argv[2],
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.1,
    )
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    answers = model.generate([{"prompt_token_ids": window} for window in windows], asked)
    found = [
        step[token].logprob
        for window, answer in zip(windows, answers, strict=True)
        for step, token in zip(answer.prompt_logprobs[1:], window[1:], strict=True)
    ]
    print(json.dumps(found))

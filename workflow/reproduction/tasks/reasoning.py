"""HumanEval and GSM8K as RCP's Table 3 asks them: a program written and run, a number reasoned out; no examples.

The papers leave the prompt open (`ZeroShot.template`); without one a program is continued where it stops, and the
question is lm-eval's. lm-eval's scorers give other numbers: its HumanEval runs programs unconfined and finds none in
Markdown; its GSM8K compares text ("5.00" is not 5) and reads "The answer is" and "####" in different tasks.
"""

import re
from decimal import Decimal
from typing import Any

from reproduction.tasks.definitions import written

#: Where the continuation of a function has ended (Chen et al. 2021, Sec. 2.1).
_AFTER_A_FUNCTION = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
#: Where a model that answers goes on to ask.
_NEXT_QUESTION = ["Question:", "### Instruction", "USER:"]
_TOKENS = 512
_FENCE = re.compile(r"```(?:[Pp]ython\d?)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_SAID = re.compile(r"####|[Tt]he answer is:?")


def by_running(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """Whether the program that was written passes the item's tests, by running it: pass@1 of one greedy answer.

    lm-eval calls this for each item, and only where running code was allowed (`unsafe_code`).
    """
    from reproduction.tasks.sandbox import passes

    return {
        "pass_at_1": float(passes(program(item, generated[0]), f"{item['test']}\n\ncheck({item['entry_point']})\n"))
    }


def by_number(item: dict[str, Any], generated: list[str]) -> dict[str, float]:
    """Whether the number that a solution says to be the answer is the right one."""
    right, found = number(item["answer"]), number(generated[0])
    return {"exact_match": float(found is not None and found == right)}


def program(item: dict[str, Any], response: str) -> str:
    """The program that a response stands for: after the item's head what continues it, or defines it anew.

    Of a response in Markdown it is the first piece of code; what runs as a script and examples of use are cut off.
    """
    fenced = _FENCE.search(response)
    code = fenced[1] if fenced else response
    for end in ('\nif __name__ == "__main__"', "\nif __name__ == '__main__'", "\n# Example usage"):
        code = code.split(end)[0]
    anew = re.search(rf"^\s*def {re.escape(item['entry_point'])}\s*\(", code, re.MULTILINE)
    return item["prompt"] + ("\n" + code.lstrip("\n") if anew else code) + "\n"


def number(text: str) -> Decimal | None:
    """The number after the last "The answer is" (MetaMath) or "####" (GSM8K's own solutions); None without either."""
    said = _SAID.split(text)
    found = _NUMBER.search(said[-1]) if len(said) > 1 else None
    return Decimal(re.sub(r"[$,]", "", found[0])) if found else None


DEFINITIONS: dict[str, dict[str, Any]] = {
    "humaneval": {
        "dataset_path": "openai/openai_humaneval",
        "dataset_name": None,
        "test_split": "test",
        "unsafe_code": True,
        "doc_to_text": "{{prompt}}",
        **written("{{test}}", _AFTER_A_FUNCTION, _TOKENS, "pass_at_1", by_running),
    },
    "gsm8k": {
        "dataset_path": "openai/gsm8k",
        "dataset_name": "main",
        "test_split": "test",
        "fewshot_split": "train",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        **written("{{answer}}", _NEXT_QUESTION, _TOKENS, "exact_match", by_number),
    },
}
"""lm-eval's configuration of each task, without a template."""

ANSWERED: dict[str, dict[str, Any]] = {
    "humaneval": {"generation_kwargs": {**DEFINITIONS["humaneval"]["generation_kwargs"], "until": ["### Instruction"]}},
    "gsm8k": {"doc_to_text": "{{question}}"},
}
"""What a template changes of them: a response may hold several functions, and the question stands alone in it."""

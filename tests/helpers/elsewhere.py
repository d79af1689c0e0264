"""A table of numbers that others measured."""

from typing import Any

NUMBERS = """row,column,metric,value,deviation,origin
Baseline,Llama-2-7B,perplexity,5.472,,
Baseline,Llama-2-7B,bleu,30,,
QuaRot,Llama-2-7B,perplexity,6.2,0.05,"somebody, issue 12"
QuaRot,Llama-2-13B,perplexity,-,,
Other,Llama-2-7B,perplexity,5.3,,
"""


TABLE: dict[str, Any] = {
    "id": "quarot_others",
    "title": "what others measured",
    "section": "5",
    "caption": "Others.",
    "numbers": "numbers/others.csv",
    "origin": "A README.",
    "published": "published/small.csv",
    "metrics": {"bleu": {"title": "BLEU", "better": "higher"}},
    "claims": [
        {"text": "QuaRot is worse.", "section": "5", "mechanism": {"better": {"row": "Baseline", "than": ["QuaRot"]}}},
        {"text": "Nothing is better.", "section": "5", "mechanism": {"better": {"row": "Baseline", "than": ["Other"]}}},
        {
            "text": "It costs a point.",
            "section": "5",
            "setting": {"no_worse": {"row": "QuaRot", "than": ["Baseline"], "points": 1}},
        },
    ],
}

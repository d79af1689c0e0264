"""A table of settings and what its paper prints."""

from typing import Any

PUBLISHED = """row,column,metric,value,unit
QuaRot,Weight,granularity,Per-Channel,text
QuaRot,Cache,symmetry,Sym,text
Groups,Weight,granularity,-,text
Groups,Cache,symmetry,Asym,text
"""


TABLE: dict[str, Any] = {
    "id": "quarot_table4",
    "title": "settings",
    "section": "5",
    "caption": "Settings.",
    "columns": [
        {"name": "Weight", "part": "weights", "fact": "granularity"},
        {"name": "Cache", "part": "cache", "fact": "symmetry", "words": {"symmetric": "Sym", "asymmetric": "Asym"}},
        {"name": "Clip", "part": "activations", "fact": "clipping"},
    ],
    "rows": [
        {"name": "QuaRot", "as_in": {"table": "quarot_table1", "row": "QuaRot"}, "differs": {"Cache": "A misprint."}},
        {"name": "Groups", "method": "quarot-128g"},
    ],
    "published": "published/settings.csv",
    "claims": [
        {"text": "As printed.", "section": "5", "fact": {"as_printed": {}}},
        {"text": "In the row of groups.", "section": "5", "fact": {"as_printed": {"rows": ["Groups"]}}},
        {
            "text": "Clipped.",
            "section": "5",
            "fact": {"told": {"rows": ["QuaRot"], "column": "Clip", "says": "0.9"}},
        },
    ],
}

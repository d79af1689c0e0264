"""What tables say once: written out it is what a file would say that repeats itself."""

from typing import Any

import pytest

from reproduction.tables.project import Project
from reproduction.tables.shorthand import each, with_bits, written_out
from reproduction.tables.tables import Row, RunTable, with_rows
from rotquant.foundation.errors import ConfigError
from rotquant.recipes.presets import preset

ROWS = [
    {"name": "FP16", "method": "baseline"},
    {"name": "QuaRot", "labels": [4], "method": "quarot", "recipe": {"activations": {"clip_ratio": 0.8}}},
]
FIRST = {"id": "mine_table1", "section": "2", "metrics": [{"kind": "perplexity"}], "rows": ROWS}


def tables(*written: dict[str, Any], **file: Any) -> list[dict[str, Any]]:
    return written_out({"paper": "mine", "tables": [*written], **file})["tables"]


def test_a_table_has_the_files_fields_and_those_of_the_table_that_it_is_like_but_for_its_own() -> None:
    second = {"id": "mine_table2", "like": "mine_table1", "columns": ["A"], "rows": ["QuaRot"]}
    first, other = tables(
        {**FIRST, "figure": None}, second, defaults={"figure": {"kind": "lines"}, "published": "published/{label}.csv"}
    )
    assert (first["figure"], other["figure"]) == (None, {"kind": "lines"})
    assert (first["published"], other["published"]) == ("published/table1.csv", "published/table2.csv")
    assert (other["metrics"], other["columns"], other["rows"]) == (FIRST["metrics"], ["A"], [ROWS[1]])
    assert (first["baseline"], other["baseline"]) == ("FP16", "QuaRot")


def test_a_row_has_the_fields_of_the_row_that_it_is_like_and_its_recipe_with_its_own_changes() -> None:
    clipped = {"name": "Clipped", "like": "QuaRot", "bits": "3-4-4", "recipe": {"activations": {"bits": 8}}}
    (table,) = tables({**FIRST, "rows": [*ROWS, clipped]})
    assert table["rows"][2] == {
        "name": "Clipped", "like": "QuaRot", "labels": [4], "method": "quarot", "bits": "3-4-4",
        "recipe": {"activations": {"clip_ratio": 0.8, "bits": 8}},
    }  # fmt: skip


def test_a_row_of_a_configuration_may_be_like_one_of_the_paper(project: Project) -> None:
    own = Row.model_validate({"name": "3 bits", "like": "QuaRot", "bits": "3-4-4"})
    row = with_rows(project.one(RunTable, "quarot_table1"), [own], "here").row("3 bits")
    assert (row.labels, row.method, row.computed("here").rounded.scheme.bits) == (("GPTQ", 0), "quarot", 3)


def test_claims_have_the_fields_next_to_them_and_their_tables_section() -> None:
    alone = {"text": "A.", "section": "1"}
    (table,) = tables({**FIRST, "claims": [alone, {"quote": "Q", "claims": [{"text": "B."}, {"text": "C."}]}]})
    assert table["claims"] == [alone, *({"section": "2", "quote": "Q", "text": text} for text in ("B.", "C."))]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"id": "mine_table2", "like": "mine_table3"}, "tables.mine_table2.like: no table before it 'mine_table3'"),
        ({**FIRST, "rows": ["QuaRot"]}, "rows: no row 'QuaRot'"),
        ({**FIRST, "rows": [{"name": "B", "like": "C"}]}, "rows.B.like: no row before it 'C'"),
    ],
)
def test_what_is_like_nothing_is_refused(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tables(table)


@pytest.mark.parametrize(
    "file", [3, {"tables": 3}, {"tables": [3]}, {"tables": [{"id": [3], "rows": [3], "claims": 3}]}]
)
def test_what_is_no_table_is_left_to_validation(file: Any) -> None:
    assert written_out(file) == file


def test_bits_are_those_of_weights_inputs_and_cache_and_16_is_none() -> None:
    row = Row.model_validate(
        {"name": "A", "method": "spinquant-hard", "bits": "3-8-16", "columns": {"B": {"bits": "16-8-4"}}}
    )
    recipe = row.computed("here")
    assert (recipe.rounded.scheme.bits, recipe.activations and recipe.activations.bits, recipe.keys) == (3, 8, None)
    assert recipe.attention_output is not None
    assert recipe.attention_output.bits == 8
    other = row.computed("here", "B")
    assert (other.weights, other.calibration, other.keys and other.keys.bits) == (None, None, 4)
    assert "gptq" in recipe.methods
    assert "gptq" not in other.methods


@pytest.mark.parametrize("name", ["quarot", "rtn", "duquant", "prefixquant", "atom-128g", "rcp"])
def test_a_presets_own_bits_change_nothing(name: str) -> None:
    recipe = preset(name).model_dump(mode="json")
    own = [recipe["weights"]["scheme"], recipe["activations"], recipe["keys"]]
    assert with_bits(recipe, "-".join(str(part["bits"]) if part else "16" for part in own)) == recipe


def test_an_item_for_several_values_is_one_for_each_of_their_combinations_the_last_fastest() -> None:
    row = {"for": {"w": [4, 3], "x": ["a", "b"]}, "name": "W$w${x}$", "bits": "$w-$w-16", "labels": ["$w", "$y"]}
    assert each({"rows": ["A", row]})["rows"] == [
        "A",
        *({"name": f"W{w}{x}$", "bits": f"{w}-{w}-16", "labels": [w, "$y"]} for w in (4, 3) for x in "ab"),
    ]


def test_several_items_are_repeated_together_and_may_have_values_of_their_own() -> None:
    inner = {"for": [{"n": 1}, {"n": 2}], "text": "$model, $n"}
    items = [{"for": [{"model": "A", "m": {}}, {"model": "B", "m": None}], "each": ["$model", inner, {"$model": "$m"}]}]
    assert each(items) == [
        *("A", {"text": "A, 1"}, {"text": "A, 2"}, {"A": {}}),
        *("B", {"text": "B, 1"}, {"text": "B, 2"}, {"B": None}),
    ]


@pytest.mark.parametrize("values", [3, "$n", {"n": 3}, [3], {"n": [1], "m": "a"}])
def test_what_is_no_list_of_values_is_left_to_validation(values: Any) -> None:
    assert each([{"for": values, "name": "$n"}]) == [{"for": values, "name": "$n"}]


def test_claims_below_shared_fields_may_share_more() -> None:
    below = {"columns": ["A"], "claims": [{"text": "B."}, {"text": "C."}]}
    (table,) = tables({**FIRST, "claims": [{"quote": "Q", "claims": [below]}]})
    assert table["claims"] == [{"section": "2", "quote": "Q", "columns": ["A"], "text": text} for text in ("B.", "C.")]

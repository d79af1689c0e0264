"""What a file of tables says once, written out: shared fields, rows like others, claims under one quotation, bits, and
items of a list that differ by some values.

All but `with_bits` work on data as YAML has it, before it is validated, and leave what has another form alone.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from rotquant.foundation.data import merge
from rotquant.foundation.errors import lookup
from rotquant.recipes.recipe import find_method

#: Fields that a table never takes from the one that it is like.
_OWN = ("id", "title", "section", "caption", "published", "baseline", "claims", "figure")

#: Bits of weights, inputs of linear layers and KV cache; 16 leaves a part unquantized.
BITS = r"^\d+-\d+-\d+$"


def written_out(file: Any) -> Any:
    """A file of tables without shorthand.

    Raises:
        ConfigError: a table or a row is like one that is not before it.
    """
    file = each(file)
    if not isinstance(file, dict) or not _are_mappings(file.get("tables")):
        return file
    tables: dict[str, dict[str, Any]] = {}
    for table in file["tables"]:
        whole = {**(file.get("defaults") or {}), **_shared(table, tables), **table}
        if isinstance(published := whole.get("published"), str):
            whole["published"] = published.replace("{label}", str(table.get("id")).partition("_")[2])
        tables[str(table.get("id"))] = {**whole, **_parts(whole, tables.get(str(table.get("like")), {}))}
    return {**file, "tables": [*tables.values()] if len(tables) == len(file["tables"]) else file["tables"]}


def each(data: Any) -> Any:
    """Nested data where an item of a list with `for: {name: values}` is an item for each value, which is `$name` in it.

    Of several names each combination is one, the last name running fastest. A list in place of the mapping, of mappings
    of names to a value, is an item for each of these. A text that is `$name` alone becomes the value, such as a number.
    Where several items repeat together they stand in a list `each` next to `for`.
    """
    if isinstance(data, dict):
        return {name: each(value) for name, value in data.items()}
    if not isinstance(data, list):
        return data
    found = []
    for item in data:
        several = _each(item) if isinstance(item, dict) and "for" in item else None
        found += [each(item)] if several is None else each(several)
    return found


def _each(item: Mapping[str, Any]) -> list[Any] | None:
    """The items that one with `for` stands for; None where `for` is none of ours."""
    values = item["for"]
    if isinstance(values, dict) and all(isinstance(one, list) for one in values.values()):
        values = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    if not _are_mappings(values):
        return None
    rest = {name: value for name, value in item.items() if name != "for"}
    items = rest["each"] if rest.keys() == {"each"} and isinstance(rest["each"], list) else [rest]
    return [_filled(one, chosen) for chosen in values for one in items]


def _filled(data: Any, values: Mapping[str, Any]) -> Any:
    """Data with values for their names."""
    if isinstance(data, dict):
        return {_filled(name, values): _filled(value, values) for name, value in data.items()}
    if isinstance(data, list):
        return [_filled(one, values) for one in data]
    if not isinstance(data, str):
        return data
    if data[:1] == "$" and data[1:] in values:
        return values[data[1:]]
    return re.sub(r"\$(\{)?(\w+)(?(1)\})", lambda found: str(values.get(found[2], found[0])), data)


def _shared(table: Mapping[str, Any], before: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What a table takes from the one that it is like."""
    if "like" not in table:
        return {}
    found = lookup(before, str(table["like"]), f"tables.{table.get('id')}.like: no table before it")
    return {name: value for name, value in found.items() if name not in _OWN}


def _parts(table: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The rows and claims of a table, and the row that losses are relative to."""
    found: dict[str, Any] = {}
    rows, claims = table.get("rows"), table.get("claims")
    if isinstance(rows, list) and all(isinstance(row, dict | str) for row in rows):
        known = {row["name"]: row for row in like.get("rows", ()) if isinstance(row, dict) and "name" in row}
        found["rows"] = list(_rows(rows, known, f"tables.{table.get('id')}.rows"))
        if found["rows"] and "metrics" in table:
            found["baseline"] = table.get("baseline", found["rows"][0].get("name"))
    if _are_mappings(claims):
        found["claims"] = [{"section": table.get("section"), **claim} for claim in _claims(claims)]
    return found


def _rows(rows: list[Any], known: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    for row in rows:
        whole = lookup(known, row, f"{where}: no row") if isinstance(row, str) else row_like(row, known, where)
        known[str(whole.get("name"))] = whole
        yield whole


def row_like(row: Mapping[str, Any], known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row with the fields of the one that it is like below its own; changes to the recipe are merged.

    Raises:
        ConfigError: there is no such row.
    """
    if "like" not in row:
        return {**row}
    like = lookup(known, str(row["like"]), f"{where}.{row.get('name')}.like: no row before it")
    return {**like, **row, "recipe": merge(like.get("recipe", {}), row.get("recipe", {}))}


def _claims(claims: list[Any]) -> Iterator[dict[str, Any]]:
    """Claims, those below shared fields each with these."""
    for claim in claims:
        shared = {name: value for name, value in claim.items() if name != "claims"}
        below = claim.get("claims")
        yield from ({**shared, **one} for one in _claims(below)) if _are_mappings(below) else [claim]


def _are_mappings(data: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(data, list) and all(isinstance(one, dict) for one in data)


def with_bits(recipe: dict[str, Any], bits: str | None) -> dict[str, Any]:
    """A recipe, as data, with "4-8-16" bits of weights, of all inputs of linear layers, and of keys and values.

    16 takes the part away, and with the weights their rounding and its calibration.
    """
    if bits is None:
        return recipe
    weights, inputs, cache = (None if number == "16" else {"bits": int(number)} for number in bits.split("-"))
    changes = {"weights": weights and {"scheme": weights}, "activations": inputs, "keys": cache, "values": cache}
    if recipe.get("attention_output") is not None:
        changes["attention_output"] = inputs
    if weights is None:
        rounding = [name for name in recipe["methods"] if "rounding" in find_method(name).roles]
        changes |= {"methods": dict.fromkeys(rounding), "calibration": None}
    return merge(recipe, changes)

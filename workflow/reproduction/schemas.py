"""JSON schemas of the files that people write, for editors: generated from the models that validate these files.

`make setup` and `make schemas` write them to workflow/schemas/; each file names its own in its first line. Editors
that speak to the YAML language server complete keys and values by them and show what each is. No run reads them.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from reproduction.sources import sources
from reproduction.tables.configuration import ConfigFile, find_root
from reproduction.tables.targets import Targets
from rotquant.foundation.files import write_text
from rotquant.recipes.presets import PRESETS

SCHEMAS = Path("workflow/schemas")

MODELS: dict[str, type[BaseModel]] = {
    "config": ConfigFile,
    **{source.file_kind: source.schema for source in sources().values()},
    "targets": Targets,
}
"""What describes each kind of file."""


class _Generator(GenerateJsonSchema):
    """Without titles, which would repeat the keys, and without defaults that only say that nothing is said."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        found = super().default_schema(schema)
        return {key: value for key, value in found.items() if key != "default" or value is not None}

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        found = super().model_schema(schema)
        if "description" in found:  # without the parts about code
            found["description"] = " ".join(found["description"].partition("\n\n")[0].split())
        return found


def schema(name: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a kind of file.

    A configuration may lie on top of others, so it lacks keys and takes some of theirs away by null; one that stands
    alone says all that there is no default for.
    """
    found = MODELS[name].model_json_schema(schema_generator=_Generator)
    if name == "config":
        required = found["required"]
        _any_part(found)
        alone = {"properties": {"standalone": {"const": True}}, "required": ["standalone"]}
        found |= {"if": alone, "then": {"required": required}}
    if "tables" in found["properties"]:
        _take_shorthand(found["$defs"])
    rows = {"tables": "Row", "settings": "SettingsRow"}
    if name in rows:
        found["$defs"][rows[name]]["properties"]["method"]["examples"] = sorted(PRESETS)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"{name}.schema.json"}
    return {**head, **found}


def _take_shorthand(defined: dict[str, Any]) -> None:
    """Let a table, a row and a claim leave to others what they have in common (`tables.shorthand`)."""
    for name, section in defined.items():
        section.pop("required", None)
        properties = section.get("properties", {})
        if name.endswith("Claim"):
            described = "Claims that share the fields next to them."
            properties["claims"] = {"description": described, "type": "array", "items": {"$ref": f"#/$defs/{name}"}}
        if name == "RunTableFields":
            properties["rows"]["items"] = {"anyOf": [properties["rows"]["items"], {"type": "string"}]}


def _any_part(data: Any) -> None:
    """Take away what nested schemas require, and let every key be null."""
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _any_part(value)
    if isinstance(data, dict):
        data.pop("required", None)
        if isinstance(data.get("additionalProperties"), dict):
            data["additionalProperties"] = {"anyOf": [data["additionalProperties"], {"type": "null"}]}
        for key, value in data.get("properties", {}).items():
            if {"type": "null"} in value.get("anyOf", ()):
                continue
            described = {"description": value.pop("description")} if "description" in value else {}
            data["properties"][key] = {**described, "anyOf": [value, {"type": "null"}]}


if __name__ == "__main__":
    for kind in MODELS:
        text = json.dumps(schema(kind), indent=1, ensure_ascii=False)
        write_text(find_root() / SCHEMAS / f"{kind}.schema.json", f"{text}\n")

"""The reference: modules by their docstrings, commands by what their help says, configuration by its schema."""

import json
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from reproduction.tables.configuration import ConfigFile
from rotquant.commands.root import REPRODUCTION, cli
from scripts.documentation.links import ROOT
from scripts.documentation.words import cell, code, entries, table

#: Pages of the library's reference: name, title, sentence, modules.
MODULES = (
    ("api", "Python interface", "Quantize, load and measure.", ("rotquant.api",)),
    (
        "recipes",
        "Recipes",
        "What is done to a model, as data without torch.",
        (*(f"rotquant.recipes.{name}" for name in ("recipe", "schemes", "presets", "corpus", "traits", "registry")),),
    ),
    ("transforms", "Transforms", "Matrices, where they stand and how they are applied.",
     ("rotquant.recipes.transforms", "rotquant.models.transforms")),
    ("methods", "Writing a method", "What a method's functions get and return.",
     ("rotquant.weights.actions", "rotquant.weights.context", "rotquant.models.simulation.runtime")),
    ("tensors", "Tensors", "The mathematics on tensors: Hadamard transforms, quantizers, codebooks, lattices.", ()),
    ("models", "Models", "Families of models, and what they are made of.",
     ("rotquant.models.architectures", "rotquant.models.equivalent")),
    ("text", "Text", "Corpora by their names, and the papers' windows of tokens.",
     ("rotquant.text.loading", "rotquant.text.windows")),
    ("formats", "Formats", "Exports and what each can say.", ("rotquant.formats.export", "rotquant.formats.gguf")),
    ("metrics", "Metrics", "Perplexity, divergence, diagnosis.",
     ("rotquant.metrics.perplexity", "rotquant.metrics.divergence", "rotquant.metrics.diagnostics")),
)  # fmt: skip


def pages() -> dict[str, str]:
    """All pages of the reference by their places on the site."""
    found = {f"reference/{name}.md": _modules(title, about, modules) for name, title, about, modules in MODULES}
    found |= {f"reference/{name}.md": _command_page(name, command) for name, command in commands().items()}
    return {"reference/index.md": index(), "reference/configuration.md": configuration(), **found}


def index() -> str:
    """The list of the reference's pages."""
    modules = [[f"[{title}]({name}.md)", about] for name, title, about, _ in MODULES]
    called = [
        [f"[{code(f'rotquant {name}')}]({name}.md)", _said(command)[0], _package(name)]
        for name, command in commands().items()
    ]
    return "\n\n".join(
        [
            "# Reference",
            "Made from docstrings, commands and models when the site is built. "
            "[Configuration](configuration.md) lists all keys.",
            table(["Module", "What it has"], modules),
            "## Commands",
            table(["Command", "What it does", "Package"], called),
        ]
    )


def _package(command: str) -> str:
    return "reproduction" if command in REPRODUCTION else "library"


def _modules(title: str, about: str, modules: tuple[str, ...]) -> str:
    """A page whose content mkdocstrings makes."""
    modules = modules or tuple(
        f"rotquant.tensors.{path.stem}" for path in sorted((ROOT / "rotquant/tensors").glob("[!_]*.py"))
    )
    return "\n\n".join([f"# {title}", about, *(f"::: {module}" for module in modules)])


def commands() -> dict[str, Any]:
    """The commands and groups of commands by their names."""
    found: dict[str, Any] = get_command(cli).commands  # pyright: ignore[reportAttributeAccessIssue]
    return {name: command for name, command in found.items() if name != "version"}


def _command_page(name: str, command: Any) -> str:
    """A command's page, or that of a group with all of its commands."""
    title = [f"# rotquant {name}"]
    if not hasattr(command, "commands"):
        return "\n\n".join([*title, *_described(f"rotquant {name}", command)])
    parts = [*title, *_said(command)]
    for one, inner in command.commands.items():
        parts += [f"## {one}", *_described(f"rotquant {name} {one}", inner)]
    return "\n\n".join(parts)


def _said(command: Any) -> list[str]:
    """The paragraphs of a command's help."""
    return [" ".join(one.split()) for one in (command.help or "").replace("\b", "").split("\n\n") if one.strip()]


def _described(call: str, command: Any) -> Iterator[str]:
    """Usage, text and parameters of a command."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    yield "\n".join(["```", " ".join([call, *(_name(one) for one in arguments), "[OPTIONS]"]), "```"])
    yield from _said(command)
    if arguments:
        yield entries([(_name(one), "", one.help or "") for one in arguments])
    if options:
        yield entries([(", ".join((*one.opts, *one.secondary_opts)), _default(one), one.help or "") for one in options])


def _name(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _default(option: Any) -> str:
    """The default of an option as the help shows it."""
    if option.required:
        return "required"
    value = getattr(option.default, "value", option.default)
    if value is None or value is False or value == () or callable(value):
        return ""
    return f"default {code(', '.join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))}"


def configuration() -> str:
    """All keys of a configuration file, by the model that validates it."""
    schema = ConfigFile.model_json_schema()
    parts = [
        "# Configuration",
        "The keys of `config/config.yaml` and of files on top of it, from the models that validate them. "
        "[A GPU or a cluster](../project/config/README.md) says how files are combined; `null` takes a key away.",
        entries(list(_keys(schema))),
    ]
    for name, section in schema["$defs"].items():
        if section.get("properties"):
            parts += [f"## {_called(name)}", _sentence(section), entries(list(_keys(section)))]
    return "\n\n".join(parts)


def _called(name: str) -> str:
    """The name of a class in a schema, where two classes of one name have their modules before it."""
    return [part for part in name.split("__") if not part.isdigit()][-1]


def _sentence(section: dict[str, Any]) -> str:
    return cell(" ".join(section.get("description", "").partition("\n\n")[0].split()))


def _keys(section: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, one in section.get("properties", {}).items():
        default = f", default {code(json.dumps(one['default']))}" if one.get("default") is not None else ""
        yield name, _values(one) + default, _sentence(one)


def _values(one: dict[str, Any]) -> str:
    """The values that a schema allows, in words, with links to the sections."""
    if "$ref" in one:
        name = _called(one["$ref"].rpartition("/")[2])
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in one:
            said = dict.fromkeys(_values(inner) for inner in one[several])
            return " or ".join(words for words in said if words != "null")
    if "enum" in one:
        return ", ".join(code(str(value)) for value in one["enum"])
    if "const" in one:
        return code(str(one["const"]))
    if one.get("type") == "array":
        return f"list of {_values(one.get('items', {})) or 'values'}"
    if one.get("type") == "object":
        inside = one.get("additionalProperties")
        return f"mapping to {_values(inside)}" if isinstance(inside, dict) and inside else "mapping"
    words = {"integer": "whole number", "boolean": "true or false", "string": "text"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {one[key]}" for key, sign in bounds.items() if key in one and one[key] < 2**63]
    kind = str(one.get("type", ""))
    return " ".join([words.get(kind, kind), ", ".join(limits)]).strip()

"""YAML that people write: read without tags that make objects, without endless aliases, refused in one sentence."""

from typing import Any

import yaml

from rotquant.foundation.errors import ConfigError

LARGEST = 100_000
"""Values of a YAML file with its aliases filled in, keys included: aliases of aliases make a few lines endless."""

LONGEST = 2_000_000
"""Characters of a YAML file, which PyYAML reads at a megabyte a second."""


def yaml_value(text: str, where: str) -> Any:
    """The value of a text in YAML, without tags that make Python's objects.

    Raises:
        ConfigError: as `read_yaml`, or the text is too long; the sentence begins with `where`.
    """
    if len(text) > LONGEST:
        raise ConfigError(f"{where} has {len(text):,} characters, and YAML is read of at most {LONGEST:,}.")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, where)
        return loader.construct_document(node)
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply.") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # the latter is half of a character, or a date that there is not
        raise ConfigError(f"{where} is not valid YAML: {yaml_problem(error)}.") from None
    except (LookupError, TypeError, AttributeError):  # PyYAML's, of a tag whose text is none of its type: `!!int ""`
        raise ConfigError(f"{where} is not valid YAML: a tag stands before a value that is none of its type.") from None


def yaml_problem(error: Exception) -> str:
    """PyYAML's description of an error, as the end of a sentence: the line and column where it knows them, and the
    problem."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
    place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return " ".join(f"{place}{problem}".split()).rstrip(".")


def _check_nodes(
    node: yaml.Node, where: str, above: tuple[yaml.Node, ...] = (), sizes: dict[int, int] | None = None
) -> int:
    """Count a node's values with each alias in it filled in; each node is looked at once.

    Raises:
        ConfigError: more than `LARGEST`, an alias inside of what it names, or a mapping that names a key twice, of
            which YAML would keep the last.
    """
    sizes, line = {} if sizes is None else sizes, node.start_mark.line + 1
    if node in above:
        raise ConfigError(f"{where}, line {line}: an alias stands inside of what it names.")
    if id(node) in sizes:
        return sizes[id(node)]
    inside: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, where)
        inside = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        inside = node.value
    nested = [part for part in inside if not isinstance(part, yaml.ScalarNode)]
    size = 1 + len(inside) - len(nested) + sum(_check_nodes(part, where, (*above, node), sizes) for part in nested)
    if size > LARGEST:
        raise ConfigError(f"{where}, line {line}: with its aliases filled in this has more than {LARGEST:,} values.")
    sizes[id(node)] = size
    return size


def _check_keys(node: yaml.MappingNode, where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
            line = key.start_mark.line + 1
            raise ConfigError(f"{where}, line {line}: the key {key.value!r} occurs twice in one mapping.")
        seen.add((key.tag, str(key.value)))

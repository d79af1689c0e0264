"""Changes of plain data and of bytes that a reader must answer with a sentence, if not with a result.

Data is changed as a tree (`change`), and written by `tests.trials.fuzz.documents`, which knows what JSON and YAML
alone can say: `Raw` stands for text of the format itself. Bytes are changed without knowing what they mean (`bend`).
"""

import copy
from collections.abc import Callable
from typing import Any

Draw = Callable[[int], int]
"""A whole number below the given one, drawn for a case."""
Path = tuple[str | int, ...]

#: Stands before a key of which a mapping has two.
TWICE = "@@twice@@"


class Raw(str):
    """Text of the format itself, which no plain data gives: a number of 5,000 digits, an alias, a tag."""


#: What leads out of a folder, or names what is no file: absolute, upwards, of devices, of the network.
PLACES = (
    "../../outside/secret.txt",
    "../outside",
    "/etc/passwd",
    "/dev/zero",
    "/proc/self/environ",
    "~/.ssh/id_rsa",
    "file:///etc/passwd",
    "https://localhost:9/x",
    "..",
    ".",
    "/",
    "a/../../b",
    "x\0y",
    "nobody/nothing",
)
_TEXTS = (
    "",
    " ",
    "\0",
    "\ud800",
    "\x1b[31mred\x1b[2J",
    "one\ntwo\n\nthree",
    "\u202eabc",
    "1",
    "nan",
    "null",
    "a" * 300,
    "long " * 20_000,
    "é\u0301\U0001f600",
    "{0.__class__.__mro__}",
    "{nothing}",
    "{",
    "%s%n%(x)s",
    "{{ 7 * 7 }}{% raw %}",
    "$(touch touched)",
    "<script>alert(1)</script>",
    "|a|b|",
    "__class__",
    "0123456789abcdef",
)
_NUMBERS = (0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-320, 1e308, -1e308)
_SPECIAL = (float("nan"), float("inf"), float("-inf"), None, True, False)
_NESTED: tuple[Any, ...] = ([], {}, [[]], [None], {"": None}, {"a": {"b": 1}}, [0] * 10_000, [{}, 1, "a"])

#: What JSON can say, as text.
JSON_TEXTS = tuple(
    map(
        Raw,
        (
            "9" * 5000,
            "1e999",
            "-1e999",
            "[" * 30_000 + "]" * 30_000,
            '{"a":' * 5000 + "1" + "}" * 5000,
            '{"a": 1, "a": 2}',
            '"\\ud800"',
            "NaN",
            "-Infinity",
            "{",
            "]",
            '"',
            "",
        ),
    )
)
_LAUGHS = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'lol'}]" for n in range(12))
#: What YAML can say, as text in flow style.
YAML_TEXTS = tuple(
    map(
        Raw,
        (
            f"[{_LAUGHS}]",
            "&a [*a]",
            "&b {c: *b}",
            "*nothing",
            '!!python/object/apply:os.system ["touch touched"]',
            "!!python/name:os.system",
            "!!python/object/new:subprocess.Popen [[touch, touched]]",
            "!nothing {a: 1}",
            "{<<: {a: 1}, a: 2}",
            "{<<: 3}",
            "{<<: [{a: 1}, 2]}",
            "{[a]: b}",
            "{{a: 1}: b}",
            "{? a}",
            "{1: a, '1': b, 1.0: c, true: d}",
            "{a: 1, a: 2}",
            '!!int ""',
            '!!int "x"',
            '!!int "0x"',
            '!!float ""',
            '!!float "x"',
            '!!bool "maybe"',
            '!!timestamp "x"',
            "2024-02-30",
            "2024-01-01",
            "2001-12-14T21:59:43.10-99:00",
            '!!binary "a"',
            '!!binary "é"',
            "!!set {a, b}",
            "!!omap [a]",
            "!!pairs [a: b, c]",
            "!!str {a: 1}",
            "!!map [1]",
            "!!seq {a: 1}",
            "0b2",
            "190:20:30",
            "1_000",
            "=",
            "~",
            "'",
            "[" * 2000 + "]" * 2000,
            "{a: " * 2000 + "}" * 2000,
            "9" * 5000,
            "? " * 500,
            "%YAML 9.9",
            "--- a\n--- b",
            "\t",
            '"\\ud800"',
            '"\\x00"',
        ),
    )
)


def paths(tree: Any, most: int = 3000) -> list[Path]:
    """Where each value of a tree stands, the tree itself first."""
    found: list[Path] = []
    waiting: list[Path] = [()]
    while waiting and len(found) < most:
        path = waiting.pop(0)
        found.append(path)
        value = _at(tree, path)
        inside = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        waiting += [(*path, part) for part in inside]
    return found


def change(tree: Any, draw: Draw, texts: tuple[Raw, ...]) -> Any:
    """A copy of a tree with one change; `texts` are what its format alone can say."""
    tree = copy.deepcopy(tree)
    places = paths(tree)
    path = places[draw(len(places))]
    value = _at(tree, path)
    kind = draw(10)
    if kind < 4 or not path:
        return _put(tree, path, nasty(draw, texts))
    if kind == 4:
        return _without(tree, path)
    if kind == 5:
        return _renamed(tree, path, draw)
    if kind == 6:
        return _put(tree, path, _at(tree, places[draw(len(places))]))
    if kind == 7:
        return _put(tree, path, _near(value, draw))
    if kind == 8:
        return _repeated(tree, path, draw)
    return _put(tree, path, [[[value]]] if draw(2) else {"a": value})


def nasty(draw: Draw, texts: tuple[Raw, ...]) -> Any:
    """A value that few readers expect."""
    groups: tuple[tuple[Any, ...], ...] = (_SPECIAL, _NUMBERS, _TEXTS, _NESTED, PLACES, texts or _TEXTS)
    group = groups[draw(len(groups))]
    return group[draw(len(group))]


def bend(content: bytes, draw: Draw) -> bytes:
    """Bytes with one change: flipped, cut, filled in, doubled or replaced."""
    place = draw(len(content) + 1)
    length = 1 + draw(64)
    kind = draw(7)
    if kind == 0 and content:
        place %= len(content)
        return content[:place] + bytes([content[place] ^ (1 << draw(8))]) + content[place + 1 :]
    if kind == 1:
        return content[:place]
    if kind == 2:
        return content[:place] + bytes(draw(256) for _ in range(min(length, 8))) + content[place:]
    if kind == 3:
        return content[:place] + content[place : place + length] * (1 + draw(200)) + content[place + length :]
    if kind == 4:
        return content[:place] + content[place + length :]
    if kind == 5:
        return content[:place] + bytes([(0, 255, 10, 34, 123, 91, 194)[draw(7)]]) * length + content[place + length :]
    return content * draw(3)


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _put(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return copy.deepcopy(value)
    _at(tree, path[:-1])[path[-1]] = copy.deepcopy(value)
    return tree


def _without(tree: Any, path: Path) -> Any:
    del _at(tree, path[:-1])[path[-1]]
    return tree


def _renamed(tree: Any, path: Path, draw: Draw) -> Any:
    """The key of a value is another, or there is a second one of it; in lists the value stands twice."""
    above, key = _at(tree, path[:-1]), path[-1]
    if isinstance(above, list):
        above.insert(draw(len(above) + 1), copy.deepcopy(_at(tree, path)))
        return tree
    names = (*_TEXTS, *PLACES, "id", "name", "__init__")
    new = (f"{TWICE}{key}", f"{key}x", f"{key}"[:-1], names[draw(len(names))])[draw(4)]
    above[new] = copy.deepcopy(above[key]) if draw(2) or new.startswith(TWICE) else above.pop(key)
    return tree


def _near(value: Any, draw: Draw) -> Any:
    """A value like this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return (value + 1, value - 1, -value, str(value), [value], value * 1e6)[draw(6)]
    if isinstance(value, str):
        return (value + "x", value[:-1], value.upper(), f" {value}", [value], f"../{value}", f"/{value}")[draw(7)]
    if isinstance(value, list):
        return (value[:-1], value[::-1], value * 2, dict(enumerate(map(str, range(len(value))))), value[:1])[draw(5)]
    if isinstance(value, dict):
        return ([*value], [*value.values()], {}, [value], dict(reversed(value.items())))[draw(5)]
    return (0, "None", [])[draw(3)]


def _repeated(tree: Any, path: Path, draw: Draw) -> Any:
    value = _at(tree, path)
    count = (2, 100, 3000)[draw(3)]
    if isinstance(value, str):
        return _put(tree, path, (value * count)[:200_000])
    if isinstance(value, list) and value:
        return _put(tree, path, (value * count)[:20_000])
    if isinstance(value, dict):
        return _put(tree, path, value | {f"more{n}": None for n in range(count)})
    return _put(tree, path, [value] * count)

"""JSON parsed as plain data, with one kind of error for all that Python stumbles over in it."""

import json
import re
from pathlib import Path
from typing import Any

#: JSON's escape of half of a character, which has none in UTF-8 unless the other half follows.
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(content: bytes, finite: bool = False) -> Any:
    """JSON in UTF-8.

    Args:
        finite: refuse NaN and Infinity, which Python reads and JSON does not have.

    Raises:
        ValueError: it is none, is nested too deeply, or has a number or a text that Python has no other use for: of
            thousands of digits, or with half of a character.
    """
    try:
        data = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant if finite else None)
        if _HALF.search(content):
            json.dumps(data, ensure_ascii=False).encode()
        return data
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 at byte {error.start + 1}") from None
    except UnicodeEncodeError:
        raise ValueError("a text in it has half of a character") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if "digits" not in str(error):
            raise
        raise ValueError("a number in it has too many digits") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it has the number {name}")


def broken_line(path: str | Path) -> str | None:
    """Describe the first line of a JSON-lines file that is no JSON; None where each is."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line if line.strip() else "null")
            except json.JSONDecodeError as error:
                return f"line {number} is no JSON, {error.msg[:1].lower()}{error.msg[1:]} at character {error.colno}"
            except RecursionError:
                return f"line {number} is nested too deeply"
            except ValueError:
                return f"line {number} has a number of too many digits"
    return None

"""Known vulnerabilities of the packages of requirements.lock, as the Python Packaging Advisory Database has them.

One question to the advisory service by pip-audit; where it does not answer the trial is skipped. What is known and does
not matter here is listed below with its reason.
"""

import importlib.util
import json
import subprocess
import sys

from tests.trials import trial as trials
from tests.trials.trial import REPOSITORY, Skip, Trial

LOCK = REPOSITORY / "requirements.lock"
#: Advisories by their id, and why each does not matter here; one that no package has any more fails the trial.
IGNORED: dict[str, str] = {}
#: Seconds to wait for a connection, and for all answers together.
CONNECT, ALL = 10, 300


def body(trial: Trial) -> None:
    """Ask once and count."""
    if importlib.util.find_spec("pip_audit") is None:
        raise Skip("pip-audit is not installed; `make setup` installs it.")
    found = advisories()
    unknown = [one["name"] for one in found if "skip_reason" in one]
    if len(unknown) == len(found):
        raise Skip(
            f"the advisory service answers, and knows none of the {len(found)} packages ({found[0]['skip_reason']})."
        )
    trial.check("The advisory service knows every locked package", not unknown, ", ".join(unknown))
    known = {
        advisory["id"]: f"{one['name']} {one['version']}: {advisory['id']}, mended in {advisory['fix_versions']}"
        for one in found
        for advisory in one.get("vulns", ())
    }
    for advisory, what in sorted(known.items()):
        if advisory in IGNORED:
            trial.say(f"{what}; does not matter here: {IGNORED[advisory]}")
    matters = sorted(what for advisory, what in known.items() if advisory not in IGNORED)
    trial.check("No locked package has a known vulnerability that matters here", not matters, "; ".join(matters))
    stale = sorted(IGNORED.keys() - known.keys())
    trial.check("Every advisory that is passed over is still one", not stale, ", ".join(stale))
    trial.figure("packages", len(found))
    trial.figure("advisories passed over", len(known) - len(matters))


def advisories() -> list[dict]:
    """What the service says of each locked package.

    Raises:
        Skip: it does not answer.
    """
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--requirement", str(LOCK)]
    command += ["--format", "json", "--progress-spinner", "off", "--timeout", str(CONNECT)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ALL, stdin=subprocess.DEVNULL)
        return json.loads(done.stdout)["dependencies"] or [{"skip_reason": "it names no package"}]
    except subprocess.TimeoutExpired:
        raise Skip(f"the advisory service has not answered all within {ALL} s.") from None
    except (json.JSONDecodeError, KeyError):
        lines = done.stderr.strip().splitlines() or ["it says nothing"]
        raise Skip(f"the advisory service cannot be asked ({lines[-1][:200]}).") from None


if __name__ == "__main__":
    trials.run("audit", __doc__.partition("\n")[0], body)

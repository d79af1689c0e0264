"""Namespaces of Linux, in which a trial changes what only its own processes see: mounts, and the network."""

import os
import subprocess
import sys

from tests.trials.trial import Skip

_INSIDE = "ROTQUANT_TRIAL_NAMESPACES"


def enter(*kinds: str) -> None:
    """Start this program anew inside of new namespaces (mount, net); returns where it is in them already.

    Raises:
        Skip: this machine does not allow them.
    """
    if os.environ.get(_INSIDE) == "+".join(kinds):
        return
    command = ["unshare", *(f"--{kind}" for kind in kinds)]
    if os.geteuid() != 0:
        command.append("--map-root-user")
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        raise Skip("there is no program unshare (util-linux), which makes namespaces.") from None
    if allowed.returncode != 0:
        raise Skip(f"this machine allows no new namespaces ({allowed.stderr.strip()}).")
    os.environ[_INSIDE] = "+".join(kinds)
    assert sys.orig_argv[0]
    os.execvp(command[0], [*command, sys.executable, *sys.orig_argv[1:]])

"""Namespaces of Linux, in which a trial changes what only its own processes see: mounts, and the network."""

import os
import subprocess
import sys
from pathlib import Path

from rotquant.foundation.files import cache_folder
from tests.trials.trial import REPOSITORY, Skip

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


def with_packages(*packages: str) -> Path:
    """Debian packages as if they were installed, for this program and what it starts: unpacked, and laid over /usr.

    What the machine has itself comes first. The program must be in a mount namespace of its own (`enter`).

    Returns:
        The folder that the packages are unpacked in, kept in the user's cache.

    Raises:
        Skip: they cannot be had, or not be mounted.
    """
    folder = cache_folder("debian") / "-".join(packages)
    unpacked = subprocess.run(
        ["scripts/debian", str(folder), *packages], cwd=REPOSITORY, capture_output=True, text=True
    )
    if unpacked.returncode != 0:
        raise Skip(unpacked.stderr.strip().removeprefix("skipped: "))
    over = ["mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/usr:{folder}/usr", "/usr"]
    mounted = subprocess.run(over, capture_output=True, text=True)
    if mounted.returncode != 0:
        raise Skip(f"this machine allows no overlay of /usr ({mounted.stderr.strip()}).")
    return folder

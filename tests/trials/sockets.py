"""A network that leads nowhere, in which every attempt to reach it is seen, and every socket that listens.

A namespace of its own has the loopback interface and one more, with an address, the route to everything and the name
server behind it. Nothing answers there; what is sent is counted.
"""

import ipaddress
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.project import Copy
from tests.trials.faults import PATIENCE, Job
from tests.trials.trial import Skip

#: The pair of interfaces is what containers have, so kernels know it; IPv6 would announce itself.
NETWORK = """
set -e
echo 1 | tee /proc/sys/net/ipv6/conf/{all,default}/disable_ipv6 > /dev/null
echo 0 > /proc/sys/net/ipv6/conf/lo/disable_ipv6
ip link set lo up
ip link add outside type veth peer name nowhere
ip address add 192.0.2.1/24 dev outside
ip link set outside up
ip link set nowhere up
ip route add default via 192.0.2.2
mount --bind "$1" /etc/resolv.conf
shift
set +e
"$@"
status=$?
sed 's/^/interface /' /proc/net/dev
exit $status
"""
NAME_SERVER = "nameserver 192.0.2.2\noptions timeout:1 attempts:1\n"
#: A state of /proc/net/tcp.
LISTENS = "0A"
#: Seconds for which a server is watched.
SERVED = 5


@dataclass
class Seen:
    """What was seen of a command: packets that it sent out, and addresses other than localhost that it opened."""

    status: int = 0
    output: str = ""
    packets: int = 0
    opened: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)


def watch(project: Copy, *command: str, serves: bool = False) -> Seen:
    """Run a command where nothing can be reached, and watch it.

    Args:
        serves: it listens and would not end by itself; it is ended some seconds later.

    Raises:
        Skip: this machine allows no such network.
    """
    seen = Seen()
    with tempfile.NamedTemporaryFile("w") as names:
        names.write(NAME_SERVER)
        names.flush()
        around = ("unshare", "--net", "--mount", "bash", "-c", NETWORK, "bash", names.name)
        trial = subprocess.run([*around, "true"], capture_output=True, text=True)
        if trial.returncode != 0:
            raise Skip(f"this machine allows none ({trial.stderr.strip()}).")
        job = Job(project, *around, *command)
        deadline = job.started + PATIENCE
        while job.runs and time.monotonic() < deadline:
            _look(Path(f"/proc/{job.process.pid}/net"), seen)
            if serves and seen.listening:
                deadline = min(deadline, time.monotonic() + SERVED)
            time.sleep(0.01)
        if job.runs:
            job.kill_all()
        seen.status, seen.output = job.ends()
    told = [line.removeprefix("interface ") for line in seen.output.splitlines() if line.startswith("interface ")]
    seen.packets = max(seen.packets, _packets(told))
    return seen


def _look(net: Path, seen: Seen) -> None:
    """Add what /proc shows of a namespace now."""
    try:
        if (net.parent / "ns/net").readlink() == Path("/proc/self/ns/net").readlink():  # not yet in one of its own
            return
        device = (net / "dev").read_text()
        tables = {name: (net / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6", "udp", "udp6")}
    except OSError:  # the last process is gone
        return
    seen.packets = _packets(device.splitlines())
    for name, lines in tables.items():
        for line in lines:
            _, local, _, state, *_ = line.split()
            address = _address(local.partition(":")[0])
            if name.startswith("tcp") and state == LISTENS:
                seen.listening.add(str(address))
            if not address.is_loopback:
                seen.opened.add(f"{name} {address}")


def _packets(lines: list[str]) -> int:
    """What /proc/net/dev says was sent outside."""
    numbers = [line.partition(":")[2].split() for line in lines if line.strip().startswith("outside:")]
    return int(numbers[0][9]) if numbers else 0


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address of /proc/net: words of 32 bits, each in this machine's order of bytes."""
    words = [int(digits[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address

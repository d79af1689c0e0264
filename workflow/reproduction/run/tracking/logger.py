"""The process that logs: it reads what jobs say as it comes, and writes it to MLflow in a thread of its own.

It ends when the process that ROTQUANT_LOGS_WITH numbers has ended and all is written, at the latest some seconds after.
What it holds is in memory alone: when it is killed, `rotquant runs sync-tracking` reads the rest from the files.
"""

import json
import math
import os
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from reproduction.run.tracking.entries import Entry
from reproduction.run.tracking.line import OWNER
from reproduction.run.tracking.store import PaperExperiment, TrackingError, opened, refusing

#: Seconds between two attempts to reach a store, between two writings, and after the owner's end.
AGAIN, PAUSE, LAST = 5.0, 0.5, 15.0


@dataclass
class Running:
    """A result that a job computes: all that is known of it, steps that are not yet written, its run in each paper.

    known: what each run has already. told: the status that is written. tries: how often it could not be written though
    the store answers.
    """

    entry: Entry
    steps: list[tuple[str, float, int, int]] = field(default_factory=list)
    runs: dict[str, str] = field(default_factory=dict)
    known: dict[str, set[tuple[str, int]] | None] = field(default_factory=dict)
    told: str = ""
    tries: int = 0


class Writer:
    """What is to be written, and the client that writes it."""

    def __init__(self) -> None:
        self.client: Any = None
        self.experiments: dict[str, PaperExperiment] = {}
        self.running: dict[int, list[Running]] = {}
        self.problem = self.lost = ""

    def hear(self, line: int, words: dict[str, Any] | None) -> None:
        """Take what a job says; None: its connection has ended."""
        own = self.running.setdefault(line, [])
        if words is None:
            for one in own:
                if one.entry.status == "RUNNING":
                    one.entry = replace(one.entry, status="KILLED")
        elif "entry" in words:
            entry = Entry.parse(json.loads(words["entry"]))
            if own and own[-1].entry.key == entry.key:
                own[-1].entry = entry
            else:
                own.append(Running(entry))
        elif "steps" in words and own:
            now = int(time.time() * 1000)
            own[-1].steps += [(name, value, step, now) for name, value, step in words["steps"]]

    def write(self) -> bool:
        """Write what is not yet written; whether all is."""
        for line, own in [*self.running.items()]:
            for one in [*own]:
                if one.steps or one.entry.status != one.told:
                    try:
                        with refusing():
                            self._write(one)
                    except TrackingError as error:
                        if not self._is_there(error):
                            return False
                        one.tries += 1
                        if one.tries < 5:
                            continue
                        print(f"{one.entry.name}: {error}", flush=True)
                        self.lost = f"warning: {error} `rotquant runs sync-tracking` logs what is missing."
                        own.remove(one)
                        continue
                if one.entry.status != "RUNNING":
                    own.remove(one)
            if not own:
                del self.running[line]
        self.problem = ""
        return not any(one.entry.status != "RUNNING" for own in self.running.values() for one in own)

    def _write(self, one: Running) -> None:
        self.client = self.client or opened()
        entry = one.entry
        for paper in entry.papers:
            experiment = self.experiments.get(paper)
            if experiment is None:
                experiment = self.experiments[paper] = PaperExperiment(self.client, entry.project, paper)
            if paper not in one.runs:
                one.runs[paper], one.known[paper] = experiment.begin(entry)
            experiment.log(one.runs[paper], one.known[paper], entry, one.steps)
        one.steps, one.told = [], entry.status

    def _is_there(self, error: TrackingError) -> bool:
        """Whether the store answers, so that an error is of one result."""
        try:
            with refusing():
                self.client.search_experiments(max_results=1)
        except (TrackingError, AttributeError):
            if not self.problem:
                print(error, flush=True)
            self.problem = f"warning: {error} `rotquant runs sync-tracking` logs it later."
            self.client, self.experiments = None, {}
            return False
        return True


def write(heard: "queue.Queue[tuple[int, dict[str, Any] | None] | None]", replies: dict[int, socket.socket]) -> None:
    """Body of the thread that writes, until it hears None and all is written."""
    writer, asked, ends = Writer(), list[int](), math.inf
    while True:
        with suppress(queue.Empty):
            found = heard.get(timeout=PAUSE if writer.running or asked else None)
            while True:
                if found is None:
                    ends = min(ends, time.monotonic() + LAST)
                elif found[1] is not None and "settle" in found[1]:
                    asked.append(found[0])
                else:
                    writer.hear(*found)
                found = heard.get_nowait()
        done = writer.write()
        if done or writer.problem:
            for line in asked:
                with suppress(OSError, KeyError):
                    replies[line].sendall((writer.problem or writer.lost).encode() + b"\n")
            asked.clear()
        if ends < math.inf and (done or time.monotonic() > ends):
            with suppress(Exception):
                for experiment in writer.experiments.values():
                    experiment.leave()
            return
        if not done and writer.problem:
            time.sleep(min(AGAIN, max(0.0, ends - time.monotonic())))


def read(listening: socket.socket, owner: int) -> None:
    """Read what jobs say until the owner has ended, and of those that still speak some seconds more."""
    heard: queue.Queue[tuple[int, dict[str, Any] | None] | None] = queue.Queue()
    lines, rests, until = dict[int, socket.socket](), dict[int, bytes](), math.inf
    thread = threading.Thread(target=write, args=(heard, lines))
    thread.start()
    events = selectors.DefaultSelector()
    events.register(listening, selectors.EVENT_READ)
    try:
        events.register(os.pidfd_open(owner), selectors.EVENT_READ, "owner")
    except OSError:  # it has ended already
        until = time.monotonic() + 1
    while until == math.inf or (lines and time.monotonic() < until):
        for key, _ in events.select(None if until == math.inf else 1.0):
            if key.data == "owner":
                events.unregister(key.fileobj)
                until = time.monotonic() + LAST
            elif key.fileobj is listening:
                line, _ = listening.accept()
                user = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                if user == os.getuid():
                    lines[number := len(rests)], rests[number] = line, b""
                    events.register(line, selectors.EVENT_READ, number)
            else:
                found = b""
                with suppress(OSError):
                    found = lines[key.data].recv(1 << 16)
                *whole, rests[key.data] = (rests[key.data] + found).split(b"\n")
                for text in whole:
                    heard.put((key.data, json.loads(text)))
                if not found:
                    events.unregister(key.fileobj)
                    lines.pop(key.data).close()
                    heard.put((key.data, None))
    heard.put(None)
    thread.join()


if __name__ == "__main__":
    os.nice(5)
    read(socket.socket(fileno=int(sys.argv[1])), int(os.environ[OWNER]))

"""The warm process: what a child gets and gives back, what ends with whom, and one process for several clients.

The command that children run is a stand-in, which runs the Python that its first argument is.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.project import Copy

COMMAND = """
def app(words):
    exec(words[0], {"words": words})
    raise SystemExit
def tree():
    import typer
    cli, runs = typer.Typer(), typer.Typer()
    for group in (cli, runs):
        group.callback()(lambda: None)
    runs.command("make")(lambda key: None)
    cli.add_typer(runs, name="runs")
    return typer.main.get_command(cli)
"""
#: Writes its number, and one line once it is told to end.
WAITS = """
import os, sys, time
from pathlib import Path
me = Path(words[1])
me.with_suffix(".new").write_text(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
me.with_suffix(".new").rename(me)
while not Path(words[1] + "-ends").exists(): time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy of the packages whose command is the stand-in, and whose stages import nothing."""
    copy = Copy(tmp_path_factory.mktemp("warm"))
    copy.write("rotquant/cli.py", COMMAND)
    copy.write("workflow/reproduction/run/stages/loaded.py", "import os\n\nLOADED_BY = os.getpid()\n")
    return copy


@dataclass
class Warm:
    """A folder, and the process that the warm one ends with."""

    project: Copy
    place: Path
    owner: subprocess.Popen
    clients: list[subprocess.Popen] = field(default_factory=list)

    @property
    def folders(self) -> list[Path]:
        """The folders of warm processes."""
        return [*self.place.glob("rotquant-*")]

    @property
    def address(self) -> str:
        """The address of the warm process."""
        return f"\0rotquant-{os.getuid()}-{self.owner.pid}-{os.stat('/proc/self/ns/mnt').st_ino}-cells"

    def start(self, code: str, *words: str, log: str = "log", **variables: str) -> subprocess.Popen:
        """A client that asks for a command."""
        command = [sys.executable, "-IS", self.project.root / "workflow/reproduction/run/client.py", "cells"]
        alone = {"TMPDIR": str(self.place), "ROTQUANT_ENDS_WITH": str(self.owner.pid)}
        environment = {"CUDA_VISIBLE_DEVICES": "0", **self.project.environment(), **alone, **variables}
        with (self.place / f"{len(self.clients)}.said").open("w") as said:  # which the warm process holds open
            client = subprocess.Popen(
                [*command, self.place / log, code, *words], cwd=self.place, env=environment, stderr=said
            )
        self.clients.append(client)
        return client

    def run(self, code: str, *words: str, log: str = "log", **variables: str) -> tuple[int, str, str]:
        """Ask for a command; its status, what the client said, and what is in the log."""
        client = self.start(code, *words, log=log, **variables)
        client.wait(60)
        said = self.place / f"{len(self.clients) - 1}.said"
        path = self.place / log
        return client.returncode, said.read_text(), path.read_text() if path.exists() else ""

    def told(self, code: str) -> object:
        """What a command prints as JSON."""
        status, said, printed = self.run(f"import json, os, sys\nprint(json.dumps({code}))")
        assert (status, said) == (0, ""), printed
        return json.loads(printed)

    def waiting(self, name: str, **variables: str) -> tuple[int, str]:
        """Start a command that waits until the file NAME-ends is there; its process, and the GPU that it sees."""
        self.start(WAITS, str(self.place / name), log=f"{name}.log", **variables)
        until((self.place / name).exists)
        process, gpu = (self.place / name).read_text().split()
        return int(process), gpu

    def end(self, name: str) -> None:
        """Let a command end that waits."""
        (self.place / f"{name}-ends").touch()


def until(what: Callable[[], object]) -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.02)


def runs(process: int) -> bool:
    """Whether a process has not ended, however its parent takes that."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.fixture
def warm(project: Copy) -> Iterator[Warm]:
    place = Path(tempfile.mkdtemp(prefix="w", dir="/tmp"))
    owner = subprocess.Popen(["sleep", "600"])
    made = Warm(project, place, owner)
    yield made
    for process in (owner, *made.clients):
        process.kill()
        process.wait()
    until(lambda: not made.folders)
    shutil.rmtree(place, ignore_errors=True)  # a warm process may remove its own folder now


def test_a_child_has_the_clients_words_variables_folder_and_no_input(warm: Warm) -> None:
    code = "print(sys.argv, words, os.environ['MINE'], os.getcwd(), sys.stdin.read(), sep='\\n')"
    status, said, printed = warm.run(f"import os, sys\n{code}", "a b", "--c", MINE="für 'dich'")
    words = [f"import os, sys\n{code}", "a b", "--c"]
    assert (status, said) == (0, "")
    assert printed.splitlines() == [repr(["rotquant", *words]), repr(words), "für 'dich'", str(warm.place), ""]


def test_a_child_leaves_no_variable_or_folder_behind_for_the_next_one(warm: Warm) -> None:
    warm.run("import os\nos.environ['LEFT'] = 'x'\nos.chdir('/')\nimport json.tool")
    found = warm.told("[os.environ.get('LEFT'), os.getcwd(), 'json.tool' in sys.modules]")
    assert found == [None, str(warm.place), False]


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("", 0, ""),
        ("print('much'); print('warning: no MLflow'); print('more')", 0, "warning: no MLflow\n"),
        ("import sys; print('much'); sys.exit(0)", 0, ""),
        ("import sys; sys.exit(None)", 0, ""),
        (
            "import sys; print('warning: x'); print('rotquant: it failed.', file=sys.stderr); sys.exit(2)",
            2,
            "it failed.",
        ),
        ("print('much'); raise ValueError('a defect')", 1, "ValueError: a defect"),
        ("import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGKILL)", 137, "so far"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "ended with status 139 and left no message."),
    ],
)
def test_a_status_comes_back_with_warnings_or_the_last_line_of_a_failure(
    code: str, status: int, shown: str, warm: Warm
) -> None:
    found, said, _ = warm.run(code)
    assert found == status
    assert said == shown if status == 0 else said.endswith(f"{shown}\n")
    assert len(said.splitlines()) <= 1


def test_the_log_fills_while_a_child_works_and_its_folder_is_made(warm: Warm) -> None:
    code = """
from rotquant.foundation import progress
progress.LINES = (0.0, *progress.LINES[1:])
for step in progress.track([1, 2], "learning", "step"):
    if step == 2:
        exec(WAITS)
"""
    client = warm.start(
        f"WAITS = {WAITS!r}\n{code}", str(warm.place / "one"), log="logs/deep/one.log", ROTQUANT_QUIET=""
    )
    until((warm.place / "one").exists)
    assert "learning: step 1 of 2" in (warm.place / "logs/deep/one.log").read_text()
    assert client.poll() is None
    warm.end("one")
    assert client.wait(60) == 0


def test_what_is_imported_before_is_there_in_each_child(warm: Warm) -> None:
    code = "[__import__('reproduction.run.stages.loaded', fromlist='x').LOADED_BY, os.getppid(), os.getpid()]"
    (imported, parent, child), (again, same, other) = warm.told(code), warm.told(code)
    assert imported == parent == again == same
    assert len({parent, child, other}) == 3


#: An import that asks CUDA's driver as torch sees it: each forked child is refused.
ASKS = """
import os, sys, types
LOADED_BY = os.getpid()
sys.modules["torch"] = types.SimpleNamespace(
    cuda=types.SimpleNamespace(_is_in_bad_fork=lambda: os.getpid() != LOADED_BY), set_num_threads=lambda count: None
)
"""


def test_children_import_anew_where_an_import_has_asked_the_driver_for_a_gpu(warm: Warm) -> None:
    module = warm.project.root / "workflow/reproduction/run/stages/loaded.py"
    before = module.read_text()
    module.write_text(ASKS)
    try:
        code = "import sys; print('torch' in sys.modules, *words[1:]); raise SystemExit(3)"
        status, _, log = warm.run(code, "a word", "and 'another'")
    finally:
        module.write_text(before)
    assert (status, log.strip()) == (3, "False a word and 'another'")


def test_a_package_that_asks_the_driver_is_not_imported(warm: Warm) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('torchao'))"
    assert warm.run(code)[2].strip() == "None"


def test_children_share_a_folder_for_states_that_ends_with_the_warm_process(warm: Warm) -> None:
    code = "[os.environ.get('ROTQUANT_STATES'), os.path.isdir(os.environ.get('ROTQUANT_STATES', ''))]"
    first, second = warm.told(code), warm.told(code)
    assert first == second
    assert first[1]
    warm.owner.kill()
    warm.owner.wait()
    until(lambda: not Path(first[0]).exists())


def test_a_killed_client_takes_its_child_with_it_and_what_that_started_and_nothing_else(warm: Warm) -> None:
    starts = f"import subprocess, sys\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n{WAITS}"
    client = warm.start(starts, str(warm.place / "one"), log="one.log")
    until((warm.place / "one").exists)
    child, grandchild = int((warm.place / "one").read_text().split()[0]), int((warm.place / "one.log").read_text())
    other, _ = warm.waiting("other")
    assert runs(child)
    assert runs(grandchild)
    client.kill()
    until(lambda: not runs(child) and not runs(grandchild))
    assert runs(other)
    warm.end("other")
    assert warm.clients[1].wait(60) == 0


def test_the_warm_process_and_its_children_end_with_their_owner_and_leave_no_folder(warm: Warm) -> None:
    child, _ = warm.waiting("one")
    parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    warm.owner.kill()
    warm.owner.wait()
    until(lambda: not runs(child) and not runs(parent))
    assert warm.clients[0].wait(60) != 0
    until(lambda: not warm.folders)


def test_a_client_without_an_owner_owns_the_warm_process(warm: Warm) -> None:
    """As somebody tries it by hand."""
    environment = {**warm.project.environment(), "TMPDIR": str(warm.place)}
    environment.pop("ROTQUANT_ENDS_WITH", None)
    client = warm.project.root / "workflow/reproduction/run/client.py"
    command = [sys.executable, "-IS", client, "cells", warm.place / "log", "import os; print(os.getppid())"]
    subprocess.run(command, env=environment, cwd=warm.place, check=True, timeout=60)
    until(lambda: not runs(int((warm.place / "log").read_text())))
    until(lambda: not [*warm.place.glob("rotquant-*")])


def test_clients_that_start_at_once_have_one_warm_process(warm: Warm) -> None:
    clients = [warm.start("import os\nprint(os.getppid())", log=f"log{place}") for place in range(4)]
    assert [client.wait(60) for client in clients] == [0] * 4
    assert len({(warm.place / f"log{place}").read_text() for place in range(4)}) == 1


def test_the_folder_of_a_killed_warm_process_is_removed_by_the_next_one_and_no_other(warm: Warm) -> None:
    one, states = warm.told("[os.getppid(), os.environ['ROTQUANT_STATES']]")
    os.kill(one, signal.SIGKILL)
    until(lambda: not runs(one))
    assert Path(states).exists()
    owner = warm.owner
    warm.owner = subprocess.Popen(["sleep", "600"])
    used = warm.told("os.environ['ROTQUANT_STATES']")
    assert not Path(states).exists()
    warm.owner, other = owner, warm.owner
    assert warm.told("os.environ['ROTQUANT_STATES']") != used
    assert Path(used).exists()
    other.kill()
    other.wait()


def test_a_long_name_of_the_folder_for_temporary_files_is_no_obstacle(warm: Warm) -> None:
    place = warm.place / ("long" * 40)
    place.mkdir()
    assert warm.run("print('done')", TMPDIR=str(place))[::2] == (0, "done\n")


def test_after_a_killed_warm_process_its_child_has_ended_and_the_next_client_starts_another(warm: Warm) -> None:
    first = warm.told("os.getppid()")
    child, _ = warm.waiting("one")
    os.kill(int(str(first)), signal.SIGKILL)
    until(lambda: not runs(child))
    assert warm.clients[-1].wait(60) == 1
    assert warm.told("os.getppid()") != first


def test_a_child_that_ends_while_its_client_goes_ends_nothing_else(warm: Warm) -> None:
    """Both are seen at once where the warm process had no time before."""
    parent = int(str(warm.told("os.getppid()")))
    for first in ("child", "client"):
        child, _ = warm.waiting(first)
        os.kill(parent, signal.SIGSTOP)
        client = warm.clients[-1]
        if first == "client":
            client.kill()
            client.wait()
        warm.end(first)
        until(lambda child=child: not runs(child))
        client.kill()
        client.wait()
        os.kill(parent, signal.SIGCONT)
        assert warm.told("os.getppid()") == parent


def test_what_connects_and_says_nothing_or_nonsense_costs_others_nothing(warm: Warm) -> None:
    parent = warm.told("os.getppid()")
    for said in (b"", b"abc", (10).to_bytes(8, "big") + b"{}", (4).to_bytes(8, "big") + b"/\0x\0"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(warm.address)
            connection.sendall(said)
    assert warm.told("os.getppid()") == parent


def test_several_gpus_are_shared_in_turn_and_a_free_one_is_taken_first(warm: Warm) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "2,GPU-5", "ROTQUANT_SHARES_GPUS": "1"}
    seen = {name: warm.waiting(name, **variables)[1] for name in "abcd"}
    assert sorted(seen.values()) == ["2", "2", "GPU-5", "GPU-5"]
    assert {seen["a"], seen["b"]} == {seen["c"], seen["d"]} == {"2", "GPU-5"}
    warm.end("b")
    assert warm.clients[1].wait(60) == 0
    assert warm.waiting("e", **variables)[1] == seen["b"]


@pytest.mark.parametrize(("visible", "shares"), [("", "1"), ("3", "1"), ("GPU-5", "1"), ("2,3", None)])
def test_where_no_gpus_are_shared_a_child_sees_what_its_client_sees(
    visible: str, shares: str | None, warm: Warm
) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": visible} | ({} if shares is None else {"ROTQUANT_SHARES_GPUS": shares})
    assert warm.run("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])", **variables)[2] == f"{visible}\n"


def test_a_warm_process_that_cannot_start_is_one_sentence(warm: Warm, tmp_path: Path) -> None:
    broken = Copy(tmp_path)
    broken.write("workflow/reproduction/run/stages/loaded.py", "raise ImportError('no torch here')\n")
    warm.project = broken
    status, said, _ = warm.run("print()")
    assert (status, said.splitlines()[-1]) == (1, "rotquant: the process that jobs are forked from has ended.")
    assert "ImportError: no torch here" in said
    assert not warm.folders


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_the_process_of_somebody_else_gets_no_command(warm: Warm) -> None:
    """The address is easy to guess."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(warm.address)
        os.setegid(1000)
        os.seteuid(1000)
        try:
            other.listen()
        finally:
            os.seteuid(0)
            os.setegid(0)
        status, said, _ = warm.run("print()")
    assert (status, "belongs to somebody else" in said) == (1, True)

"""Results travel as archives between machines that share no file system: whole, once, and never what is no result."""

import io
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.helpers.project import Copy
from tests.helpers.workflows import REPORT, with_rotations
from tests.trials.projects import digests

KINDS = ("rotations", "weights", "measured")


def make(project: Copy, archive: str, *needed: Path) -> tuple[int, str]:
    """Make an archive below `store/`, on a machine that has what it needs in the store alone."""
    needs = [f"--needs={path}" for path in needed]
    return project.rotquant("runs", "archive", f"store/{archive}", *needs, "--jobs", "1")


def names(project: Copy) -> dict[str, list[str]]:
    """The archives of a project's table, by kind."""
    code = """
from pathlib import Path
from reproduction.run.archives import archive_of
from reproduction.planning.current import current_plan
plan = current_plan(Path.cwd())
for kind, keys in (("rotations", plan.rotations), ("weights", plan.weights), ("measured", plan.parts)):
    print(*(archive_of(plan, kind, key) for key in keys))
"""
    status, output = project.run("python", "-c", code)
    assert status == 0, output
    return {kind: line.split() for kind, line in zip(KINDS, output.splitlines(), strict=True)}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Copy, Path]:
    """A project that has made all archives, and the folder that they lie in.

    Before each kind its results are taken away, as on a machine that has none, so that it makes them from archives.
    """
    project = with_rotations(tmp_path_factory.mktemp("node"))
    made: dict[str, list[str]] = names(project)
    needed: list[Path] = []
    for kind in KINDS:
        shutil.rmtree(project.root / "results", ignore_errors=True)
        for archive in made[kind]:
            status, output = make(project, archive, *needed)
            assert status == 0, output
            assert all(f": {other} " not in output for other in KINDS if other != kind), "it was in an archive"
        needed = [project.root / "store" / archive for archive in made[kind]]
    return project, project.root / "store"


@pytest.fixture
def home(tmp_path: Path) -> Copy:
    """The same project on another machine, which has computed nothing."""
    return with_rotations(tmp_path / "home")


def test_pages_are_made_from_what_was_received_and_nothing_is_computed(store: tuple[Copy, Path], home: Copy) -> None:
    (archive,) = (store[1] / "measured").iterdir()
    status, output = home.rotquant("runs", "import", str(archive))
    assert (status, output) == (0, f"7 runs are here, of {archive.name[:22]} all\n")
    assert not list(home.root.glob("results/**/*.safetensors"))
    assert set(home.planned(REPORT)) == {"table", "report"}
    status, output = home.snakemake(REPORT)
    assert status == 0, output
    theirs = digests(store[0].root)
    assert theirs.items() <= digests(home.root).items()
    assert len([name for name in theirs if name.startswith("rotations")]) == 2

    earlier = {path: path.stat().st_mtime_ns for path in home.root.glob("results/[!p]*/**/*")}
    assert home.rotquant("runs", "import", str(archive))[0] == 0
    assert {path: path.stat().st_mtime_ns for path in home.root.glob("results/[!p]*/**/*")} == earlier


def test_an_archive_of_other_code_is_neither_made_nor_received(store: tuple[Copy, Path], home: Copy) -> None:
    (archive,) = (store[1] / "measured").iterdir()
    home.edit("workflow/reproduction/run/stages/weights.py", "sleep(0.05)", "sleep(0.04)")
    status, output = home.rotquant("runs", "import", str(archive))
    assert (status, output) == (0, "1 runs are here\n6 runs of other settings or code were left out\n")  # the baseline
    assert len(list(home.root.glob("results/runs/*"))) == 1
    assert not list(home.root.glob("results/weights/*"))
    home.edit("workflow/reproduction/run/stages/runs.py", "def measure_runs(", "UNUSED = 1\n\n\ndef measure_runs(")
    status, output = home.rotquant("runs", "import", str(archive))
    assert (status, output.count("\n")) == (2, 1)
    assert "none of the 7 runs is of the settings and the code" in output
    status, output = home.rotquant("runs", "archive", f"measured/{archive.name}")
    assert (status, "is of other code or settings than this machine has" in output) == (2, True)


def test_an_export_holds_all_that_pages_are_made_from_and_some_of_it_may_be_of_other_settings(
    store: tuple[Copy, Path], home: Copy
) -> None:
    (archive,) = (store[1] / "measured").iterdir()
    export = home.root / "quarot.tar.xz"
    status, output = home.rotquant("runs", "export", "-o", str(export))
    assert (status, "no table's runs are all here" in output) == (2, True)
    status, output = home.rotquant("runs", "export", "quarot", "-o", str(export))
    assert (status, "7 of 7 runs are not here or not current" in output) == (2, True)
    assert not export.exists()

    assert home.rotquant("runs", "import", str(archive))[0] == 0
    status, output = home.rotquant("runs", "export", "quarot", "-o", str(export))
    assert (status, output[:22]) == (0, "quarot.tar.xz: 7 runs,")
    assert export.stat().st_size < archive.stat().st_size / 2
    with tarfile.open(export) as file:
        assert {(one.uid, one.gid, one.uname, one.gname) for one in file} == {(0, 0, "", "")}
    theirs = digests(home.root)
    next(home.root.glob("results/runs/*")).unlink()
    status, output = home.rotquant("runs", "export", "quarot", "-o", str(export))
    assert (status, "1 of 7 runs" in output, "--partial exports the others" in output) == (2, True, True)
    some = home.root / "some.tar.xz"
    status, output = home.rotquant("runs", "export", "quarot", "-o", str(some), "--partial")
    assert (status, output[:22]) == (0, "some.tar.xz: 6 of 7 ru")
    shutil.rmtree(home.root / "results")
    assert home.rotquant("runs", "import", str(some))[1].startswith("6 runs are here\n")
    shutil.rmtree(home.root / "results")
    home.edit("config/config.yaml", "seeds:\n- 0\n- 1\n", "seeds:\n- 0\n")
    status, output = home.rotquant("runs", "import", str(export))
    assert status == 0, output
    assert "runs of other settings or code were left out" in output
    fewer = digests(home.root)
    assert fewer.items() < theirs.items()
    assert home.snakemake(REPORT)[0] == 0
    assert digests(home.root).items() >= fewer.items()


def _outside(archive: tarfile.TarFile) -> None:
    archive.addfile(tarfile.TarInfo("results/runs/../../escaped"), io.BytesIO())


def _link(archive: tarfile.TarFile) -> None:
    link = tarfile.TarInfo("results/runs/link.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
    archive.addfile(link)


def _source(archive: tarfile.TarFile) -> None:
    archive.addfile(tarfile.TarInfo("rotquant/cli.py"), io.BytesIO())


@pytest.mark.parametrize("add", [_outside, _link, _source, None])
def test_an_archive_with_anything_else_is_refused_whole(store: tuple[Copy, Path], home: Copy, add) -> None:
    (archive,) = (store[1] / "measured").iterdir()
    copy = home.root / "measured" / archive.name
    copy.parent.mkdir()
    shutil.copy(archive, copy)
    if add is None:
        copy.write_bytes(copy.read_bytes()[:-9000])
    else:
        with tarfile.open(copy, "a") as file:
            add(file)
    before = {path for path in home.root.rglob("*") if "results" not in path.parts}
    status, output = home.rotquant("runs", "import", str(copy))
    assert (status, output.count("\n")) == (2, 1)
    assert ("which is no result's file" if add else "is damaged") in output
    assert not list(home.root.glob("results/runs/*"))
    assert {path for path in home.root.rglob("*") if "results" not in path.parts} == before

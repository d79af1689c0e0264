"""Trial of the container: the image of `Containerfile` is built, and what is computed in it equals what is here.

The base is made from Debian's packages (debootstrap), so no registry of images is needed; buildah builds without a
daemon. The quick form builds the image as far as the system's packages and reads the rest of the recipe.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.trials import namespaces, projects
from tests.trials.trial import REPOSITORY, Skip, Trial, run

POLICY = {"default": [{"type": "insecureAcceptAnything"}]}
IMAGE = "rotquant-trial"


class Images:
    """buildah with a store of its own below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "policy.json").write_text(json.dumps(POLICY))
        (folder / "registries.conf").write_text("unqualified-search-registries = []\n")
        (folder / "pip").mkdir()
        self.mounts = _pip_settings(folder / "pip")

    def __call__(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of buildah.

        Raises:
            Skip: it is one that prepares, and fails.
        """
        places = ["--root", f"{self.folder}/store", "--runroot", f"{self.folder}/run"]
        command = ["buildah", *places, "--storage-driver", "overlay", *arguments]
        environment = {**os.environ, "CONTAINERS_REGISTRIES_CONF": f"{self.folder}/registries.conf"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if check and done.returncode != 0:
            raise Skip(f"buildah cannot work here ({_last(done.stderr)}).")
        return done

    def base(self) -> str:
        """An image of Debian's base system.

        Raises:
            Skip: it cannot be made.
        """
        root = self.folder / "base"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", "bookworm", str(root), _mirror()], capture_output=True, text=True
        )
        if made.returncode != 0:
            raise Skip(f"debootstrap makes no base system here ({_last(made.stdout)}).")
        policy = ["--signature-policy", f"{self.folder}/policy.json"]
        container = self("from", *policy, "scratch").stdout.strip()
        self("add", "--quiet", container, str(root), "/")
        self("commit", "--quiet", *policy, container, f"localhost/{IMAGE}-base")
        self("rm", container)
        return f"localhost/{IMAGE}-base"

    def build(self, base: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Build the project's image on a base."""
        policy = ["--signature-policy", f"{self.folder}/policy.json"]
        how = ["--isolation", "chroot", "--network", "host", "--pull-never", "--build-arg", f"BASE={base}"]
        return self("build", *policy, *how, *self.mounts, *options, str(REPOSITORY), check=False)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a shell's command in a container of the image, its folder `/out` that of `self.folder / "out"`."""
        (self.folder / "out").mkdir(exist_ok=True)
        policy = ["--signature-policy", f"{self.folder}/policy.json", "--pull-never"]
        container = self("from", *policy, f"localhost/{IMAGE}").stdout.strip()
        out = ["--volume", f"{self.folder}/out:/out"]
        return self("run", "--isolation", "chroot", *out, container, "--", "sh", "-c", command, check=False)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "without a word"


def _mirror() -> str:
    """Where this machine's apt takes Debian's packages from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian"]
    found = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    if not found:
        raise Skip("this machine's apt takes no packages from Debian.")
    return found[0]


def _pip_settings(folder: Path) -> list[str]:
    """This machine's settings of pip as options that mount them, with the files and folders that they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings: dict[str, str] = {}  # variables of the environment come last, and count
    mounts = []
    for line in listed.splitlines():
        name, _, quoted = line.partition("=")
        value = ast.literal_eval(quoted)
        if Path(value).is_file():
            shutil.copy(value, folder)
            value = f"/host-pip/{Path(value).name}"
        elif Path(value).is_dir():
            mounts += ["--volume", f"{value}:{value}:ro"]
        settings[name.rpartition(".")[2]] = value
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (folder / "pip.conf").write_text("".join(["[global]\n", *lines]))
    return [*mounts, "--volume", f"{folder}:/host-pip:ro", "--volume", f"{folder}/pip.conf:/etc/pip.conf:ro"]


def body(trial: Trial) -> None:
    """Build, and compute in the image and here."""
    namespaces.enter("mount")
    namespaces.with_packages("buildah", "debootstrap")
    with tempfile.TemporaryDirectory() as place:
        images = Images(Path(place))
        trial.versions["buildah"] = images("--version").stdout.split()[2]
        base = images.base()
        if trial.quick:
            built = images.build(base, "--target", "system")
            trial.check(
                "The system of the image is built from Debian's packages", built.returncode == 0, _last(built.stderr)
            )
            return
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
        ).stdout.strip()
        built = images.build(base, "--build-arg", f"GIT_COMMIT={commit}", "--tag", IMAGE)
        if trial.check(
            "The image is built from Debian's packages and the lock", built.returncode == 0, built.stderr[-800:]
        ):
            _compare(trial, images, Path(place))
        images("rm", "--all")


def _compare(trial: Trial, images: Images, place: Path) -> None:
    """A column of Table 1 in the image and here."""
    (place / "out").mkdir()
    (place / "out/config.yaml").write_text(json.dumps({**projects.ONE_COLUMN, "tracking": False}))
    table = f"snakemake --cores 2 {projects.REPORT} --configfile"
    done = images.run(f"{table} /out/config.yaml && cp -r results reports /out")
    trial.check("The image computes a column of Table 1", done.returncode == 0, _last(done.stderr))
    here = projects.shipped(place / "here")
    status, output = here.snakemake(projects.REPORT, "--configfile", str(place / "out/config.yaml"))
    assert status == 0, output
    mine, theirs = projects.digests(here.root), projects.digests(place / "out")
    trial.figure("runs compared", len([name for name in mine if name.startswith("run")]))
    differing = projects.difference(mine, theirs)
    trial.check(
        "All that was computed in the image is equal to the last bit to what is computed outside",
        not differing,
        differing,
    )


if __name__ == "__main__":
    run("container", __doc__.splitlines()[0], body)

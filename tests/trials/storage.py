"""Trial of a cluster without a shared file system: what jobs compute travels through an object store.

Each of two SLURM nodes has a copy of the project of its own in place of the submitting machine's, so what a job
computes reaches another only through the store: moto's server, which speaks S3 on this machine. The table is QuaRot's
Table 1 of one model with one seed, or in the quick form a small one on tiny models.
"""

import json
import os
import re
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from tests.trials import cluster, namespaces, projects
from tests.trials.cluster import Cluster
from tests.trials.trial import Trial, run
from tests.trials.undisturbed import DONE

KINDS = ("rotations", "weights", "runs")
BUCKET, PREFIX = "trial", "rotquant"


def body(trial: Trial) -> None:
    """Compute on nodes that share nothing, and compare with what is computed here."""
    namespaces.enter("mount", "pid")
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with folder as name:
        place = Path(name)
        make = projects.tiny if trial.quick else projects.shipped
        home, here = make(place / "home"), make(place / "here")
        options = [] if trial.quick else ["--configfile", _configuration(place)]
        own = {node: ((shutil.copytree(home.root, place / node, symlinks=True), home.root),) for node in cluster.NODES}
        store = _store()
        with Cluster(place / "cluster", own, cores=4):  # a job has four: the two nodes work at once
            trial.versions |= {"slurm": cluster.version()}
            trial.versions |= {name: version(name) for name in ("snakemake-storage-plugin-s3", "moto")}
            command = ["snakemake", "--profile", "profiles/slurm"]
            command += ["--default-storage-provider", "s3", "--default-storage-prefix", f"s3://{BUCKET}/{PREFIX}"]
            command += ["--shared-fs-usage", "sources", "source-cache", "software-deployment"]
            command += ["--slurm-logdir", str(place / "slurm_logs"), "--slurm-init-seconds-before-status-checks", "1"]
            started = time.monotonic()
            status, output = home.run(*command, *options, "--", "quarot_table1", timeout=3600)
            trial.figure("seconds of the jobs and the page", round(time.monotonic() - started))
            trial.check("A table is computed by nodes that share no file", status == 0, output[-3000:])
            computing = re.findall(r"slurm_logs/\w+_cells_run_weights/", output)
            _check_places(trial, home.root, place, store)
            status, output = home.run(*command, *options, "--", "quarot_table1", timeout=3600)
            trial.check("A second start has nothing to do", status == 0 and DONE in output, output[-3000:])
        status, output = here.run("snakemake", "--cores", "all", projects.REPORT, *options, timeout=3600)
        assert status == 0, output
        stored = store.copy(place / "stored")
        mine, theirs = projects.digests(here.root), projects.digests(home.root) | projects.digests(stored)
        differing = projects.difference(mine, theirs)
        trial.check("Results in the store and the table are a local run's to the last bit", not differing, differing)
        trial.figure("jobs of weights and runs", len(computing))
        trial.figure("runs in the store", len([name for name in theirs if name.startswith("run ")]))


def _check_places(trial: Trial, home: Path, place: Path, store: "Store") -> None:
    """Where files are: results in the store, the page here, and tensors nowhere any more."""
    names, bytes_ = store.content()
    for kind in KINDS:
        parts = {name.split("/")[3] for name in names if name.startswith(f"{PREFIX}/results/{kind}/")}
        trial.figure(f"{kind} in the store", len(parts))
    trial.figure("megabytes in the store", round(bytes_ / 1e6, 1))
    trial.check("The page is where Snakemake runs", (home / projects.REPORT).is_file())
    trial.check("Tensors are temporary in the store too", not any("/model/" in name for name in names), str(names))
    planned = [any((place / node).glob("results/plans/*.json")) for node in cluster.NODES]
    trial.check("Both nodes computed", all(planned), str(planned))


def _configuration(place: Path) -> str:
    file = place / "one_column.yaml"
    file.write_text(json.dumps(projects.ONE_COLUMN))
    return str(file)


class Store:
    """A server of this machine that speaks S3, and its bucket."""

    def __init__(self) -> None:
        import boto3
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        self.url = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"aws_access_key_id": "trial", "aws_secret_access_key": "trial", "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=self.url, **keys)
        self.client.create_bucket(Bucket=BUCKET)

    def content(self) -> tuple[list[str], int]:
        """The names of what is in the bucket, and its bytes."""
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [one["Key"] for one in found], sum(one["Size"] for one in found)

    def copy(self, folder: Path) -> Path:
        """All of it, in a folder."""
        for name in self.content()[0]:
            path = folder / Path(name).relative_to(PREFIX)
            path.parent.mkdir(parents=True, exist_ok=True)
            self.client.download_file(BUCKET, name, str(path))
        return folder


def _store() -> Store:
    """A store, and the environment variables by which Snakemake finds it."""
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = Store()
    settings = {"ENDPOINT_URL": store.url, "ACCESS_KEY": "trial", "SECRET_KEY": "trial"}
    os.environ.update({f"SNAKEMAKE_STORAGE_S3_{name}": value for name, value in settings.items()})
    return store


if __name__ == "__main__":
    run("storage", __doc__.splitlines()[0], body)

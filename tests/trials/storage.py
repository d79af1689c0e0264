"""Trial of a cluster without a shared file system: results and weights travel as archives through an object store.

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

KINDS = ("rotations", "weights", "measured")
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
            command = ["snakemake", "--snakefile", "workflow/storage.smk", "--profile", "profiles/slurm"]
            command += ["--default-storage-provider", "s3", "--default-storage-prefix", f"s3://{BUCKET}/{PREFIX}"]
            command += ["--shared-fs-usage", "sources", "source-cache", "software-deployment"]
            command += ["--slurm-logdir", str(place / "slurm_logs"), "--slurm-init-seconds-before-status-checks", "1"]
            started = time.monotonic()
            status, output = home.run(*command, *options, "--", "quarot_table1", timeout=3600)
            trial.figure("seconds of the jobs", round(time.monotonic() - started))
            trial.check("A table is computed by nodes that share no file", status == 0, output[-3000:])
            _check_places(trial, home.root, place, store)
        status, output = here.run("snakemake", "--cores", "all", projects.REPORT, *options, timeout=3600)
        assert status == 0, output
        status, output = home.run("snakemake", "--cores", "all", projects.REPORT, *options, timeout=3600)
        rendered = status == 0 and not re.findall("Job .*: measure", output)
        trial.check("Pages are rendered from what came home, and nothing is computed again", rendered, output[-2000:])
        mine, theirs = projects.digests(here.root), projects.digests(home.root)
        differing = projects.difference(mine, theirs)
        trial.check("What came home is equal to a local run's results to the last bit", not differing, differing)
        trial.figure("runs that came home", len([name for name in theirs if name.startswith("run ")]))


def _check_places(trial: Trial, home: Path, place: Path, store: "Store") -> None:
    """Where files are: tensors on nodes and in the store alone, each archive once."""
    names, bytes_ = store.content()
    kinds = {kind: sum(name.startswith(f"{PREFIX}/{kind}/") for name in names) for kind in KINDS}
    for kind, count in kinds.items():
        trial.figure(f"archives of {kind} in the store", count)
    trial.figure("megabytes in the store", round(bytes_ / 1e6, 1))
    on_nodes = [len(list((place / node).glob("results/weights/*/*.safetensors"))) for node in cluster.NODES]
    at_home = list(home.glob("results/**/*.safetensors"))
    apart = not at_home and sum(on_nodes) > 0 and kinds["weights"] > 0
    trial.check(
        "Tensors are on the nodes and in the store, and not where Snakemake runs", apart, f"{on_nodes} {at_home}"
    )
    trial.check("Both nodes computed", all(on_nodes), str(on_nodes))


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

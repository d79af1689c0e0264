"""Learned rotations in MLflow: one run each, with loss, signal-to-noise ratios and orthonormality of every step.

Made after the fact from the history that the learning left, as all of MLflow is.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from rotquant.foundation.files import read_json
from rotquant.reporting.tracking.store import Store, create_run
from rotquant.study.results import HISTORY_FILE, rotation_path


def read_history(root: Path, key: str) -> list[dict[str, Any]] | None:
    """The steps of a learning; None where its folder was deleted and not made again.

    Raises:
        ResultError: the file is damaged.
    """
    path = root / rotation_path(key) / HISTORY_FILE
    return read_json(path, "history of rotations") if path.exists() else None


def create_rotation(
    store: Store,
    experiment: str,
    tags: dict[str, str],
    short: dict[str, str],
    record: dict[str, Any],
    history: list[dict[str, Any]],
) -> str:
    """The id of a new MLflow run of one learned rotation.

    Args:
        short: parameters that tell it from others.
        record: its provenance; the learning's settings become parameters.
        history: what is a number in a step's record becomes a metric of that name at that step.
    """
    from mlflow.entities import Metric

    end = int(datetime.fromisoformat(record["date"]).timestamp() * 1000)
    start = end - int(1000 * float(record["seconds"]))
    metrics = [
        Metric(name, float(value), start + (end - start) * (place + 1) // len(history), step["step"])
        for place, step in enumerate(history)
        for name, value in step.items()
        if name != "step" and isinstance(value, int | float)
    ]
    metrics.append(Metric("seconds", float(record["seconds"]), end, 0))
    fields = {name: record[name] for name in ("seed", "learning", "digest")}
    fields["source"] = {"checkpoint": record["checkpoint"], "digest": record["checkpoint_digest"]}
    return create_run(store, experiment, tags, (start, end), metrics, {**short, **fields})

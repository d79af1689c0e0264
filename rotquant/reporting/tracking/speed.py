"""What MLflow shows of a speed table: one run made from its record, its GPU and code as tags."""

from rotquant.bench.records import Record
from rotquant.reporting.tracking.experiments import writer
from rotquant.reporting.tracking.runs import NOTE, Entry, Experiment, Logged
from rotquant.reporting.tracking.store import opened
from rotquant.study.project import Project
from rotquant.study.speed.definitions import SpeedTable


def log_speed(project: Project, record: Record, table: SpeedTable) -> Logged:
    """Make MLflow show the record of a speed table as one run: its seconds and bytes by cell, its GPU and code as tags.

    Raises:
        TrackingError: the store cannot be reached or written.
    """
    known = record.by_key
    metrics = {
        f"{cell.grid}/{cell.row}/{cell.column}/{name}": measured.value
        for cell in table.cells
        if cell.key in known
        for name, measured in known[cell.key].quantities.items()
        if measured.low is not None or name.endswith("bytes")
    }
    about = {"paper": table.paper, "gpu": record.gpu, "title": table.title, NOTE: table.caption}
    environment = record.sittings[-1].environment
    entry = Entry(table.id, "speed", table.id, about, record.model_dump(mode="json"), environment, metrics)
    with opened(project.root, writer(project)) as store:
        experiment = Experiment(store, project, table.paper)
        experiment.show(entry)
        experiment.finish()
        return experiment.logged(table.id, {}, {})

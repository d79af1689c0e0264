"""MLflow's view of a speed table: one run made from its record, its GPU and code as tags."""

from reproduction.benchmarks.records import Record
from reproduction.render.tracking.experiments import writer
from reproduction.render.tracking.runs import NOTE, Logged, LoggedEntry, ShownExperiment
from reproduction.render.tracking.store import opened
from reproduction.tables.project import Project
from reproduction.tables.speed.definitions import SpeedTable


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
    entry = LoggedEntry(table.id, "speed", table.id, about, record.model_dump(mode="json"), environment, metrics)
    with opened(project.root, writer(project)) as store:
        experiment = ShownExperiment(store, project, table.paper)
        experiment.show(entry)
        experiment.finish()
        return experiment.logged(table.id, {}, {})

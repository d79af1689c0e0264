"""MLflow as a view of the result files: one MLflow run per run, one experiment per paper, one parent run per table.

The store is SQLite in the project folder unless MLFLOW_TRACKING_URI names another. A run used by several tables is
shown once, under the first of them, and tagged by all: the filter ``tags.`rotquant.table.quarot_table9` != ''`` finds
the runs of a table. Every MLflow run has the run's key and a hash of its result file, so logging again changes
nothing, a changed result replaces the older run, and a deleted database is rebuilt from the files. This is the only
package that imports MLflow. A learned rotation, and trained weights, are a run with their history, shown once they
are complete; a speed table is a run made from its record. `views` are the charts that its interface opens on.
"""

from reproduction.render.tracking.experiments import links
from reproduction.render.tracking.location import TrackingError, find_location, printable
from reproduction.render.tracking.papers import log_tables
from reproduction.render.tracking.runs import log_report
from reproduction.render.tracking.speed import log_speed
from reproduction.render.tracking.store import initialise, opened

__all__ = [
    "TrackingError",
    "find_location",
    "initialise",
    "links",
    "log_report",
    "log_speed",
    "log_tables",
    "opened",
    "printable",
]

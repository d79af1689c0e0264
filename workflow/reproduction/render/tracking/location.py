"""Location of MLflow's store: a SQLite file in the project folder, or the one in MLFLOW_TRACKING_URI.

Relative paths start at the project folder, so a command means the same store from every folder in it. Locations that
MLflow would refuse, or write to unnoticed, are refused here in one sentence.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rotquant.foundation.errors import RotquantError

VARIABLE = "MLFLOW_TRACKING_URI"

#: Folder of tables' files for runs in a database, set by MLflow's own variable.
FILES = "MLFLOW_DEFAULT_ARTIFACT_ROOT"

#: Names that MLflow takes for a service.
_NAMES = ("databricks", "databricks-uc", "uc")


class TrackingError(RotquantError):
    """MLflow's store cannot be reached, read or written."""


@dataclass(frozen=True)
class Location:
    """A store of MLflow.

    uri: as MLflow takes it, with absolute paths. path: its file or folder on this machine; None for a server, which
    other machines and other projects may write to at any time. root: the project's folder.
    """

    uri: str
    path: Path | None = None
    root: Path = Path()

    @property
    def database(self) -> Path | None:
        """The SQLite file, which only this process writes and may repair; None for any other store."""
        return self.path if self.uri.startswith("sqlite") else None

    @property
    def is_server(self) -> bool:
        """Whether the store is a tracking server with its own browser interface."""
        return self.uri.startswith(("http://", "https://"))

    @property
    def is_database_server(self) -> bool:
        """Whether the store is a database that MLflow connects to directly, such as PostgreSQL."""
        return self.path is None and re.match(r"(postgresql|mysql|mssql)\b", self.uri) is not None

    def artifacts(self, experiment: str) -> str | None:
        """Folder of an experiment's reports and figures: next to our database; None: the store decides.

        For a database server it is the same folder of this project, unless MLFLOW_DEFAULT_ARTIFACT_ROOT names another:
        MLflow would take the working folder.
        """
        if self.is_database_server and os.environ.get(FILES):
            return f"{os.environ[FILES].rstrip('/')}/{experiment}"
        if self.database is None and not self.is_database_server:
            return None
        folder = self.database.parent if self.database else self.root
        return (folder / "mlartifacts" / experiment).as_uri()

    def reaches(self, artifacts: str) -> bool:
        """Whether files can be put into a run's artifact folder: not where a database names another machine's.

        MLflow would create the same folders on every machine, each with files that the others do not see.
        """
        place = urlsplit(artifacts)
        if not self.is_database_server or place.scheme not in ("", "file"):
            return True
        return Path(unquote(place.path)).parents[1].is_dir()  # the experiment's own, created with it


def find_location(root: Path) -> Location:
    """Find the store of a project.

    Raises:
        TrackingError: MLFLOW_TRACKING_URI names a missing folder, or nothing that MLflow can store runs in.
    """
    root = root.resolve()
    given = os.environ.get(VARIABLE, "").strip() or "sqlite:///mlflow.db"
    try:
        scheme = urlsplit(given).scheme
    except ValueError as error:
        raise TrackingError(f"{VARIABLE}={printable(given)} is not a URI ({error}).") from None
    if scheme.partition("+")[0] == "sqlite":
        return _sqlite(given, root)
    if scheme in ("", "file") and given not in _NAMES:
        return _folder(given, root)
    if scheme in ("http", "https") and not urlsplit(given).hostname:
        raise TrackingError(f"{VARIABLE}={printable(given)} names no host; a server is written http://127.0.0.1:5000.")
    return Location(given, root=root)


def printable(text: str) -> str:
    """A tracking URI, or a text with one in it, without its password."""
    text = re.sub(r"(://[^/:@\s]*:)[^\s'\"]*@", r"\1***@", text)
    return re.sub(r"([?&]password=)[^&#\s'\"]*", r"\1***", text)


def _sqlite(given: str, root: Path) -> Location:
    start, _, rest = given.partition(":///")
    name, question, options = rest.partition("?")
    if not name or name == ":memory:" or name.startswith("file:"):
        raise TrackingError(
            f"{VARIABLE}={printable(given)} names no file to keep runs in; a database is written sqlite:///mlflow.db "
            "(relative to the project folder) or, with four slashes, sqlite:////absolute/path/mlflow.db."
        )
    path = root / name
    if not path.parent.is_dir():
        raise TrackingError(
            f"{VARIABLE}={printable(given)}: there is no folder {path.parent}; make it, or correct the path."
        )
    return Location(f"{start}:///{path}{question}{options}", path, root)


def _folder(given: str, root: Path) -> Location:
    path = root / given.removeprefix("file://").removeprefix("file:")
    if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        raise TrackingError(
            f"{VARIABLE}={printable(given)} is a folder, in which MLflow 3 keeps no runs of itself: name a database, "
            "sqlite:///mlflow.db, or a server, http://127.0.0.1:5000, or set MLFLOW_ALLOW_FILE_STORE=true."
        )
    return Location(path.as_uri(), path, root)

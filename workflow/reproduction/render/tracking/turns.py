"""Turns at a database server: one process of a project writes at a time, on any machine.

PostgreSQL has locks whose meaning programs agree on. Such a lock belongs to a transaction, so a killed process leaves
none. Without it every process on a fresh database would create its tables, and all that show a table at once would
make the same runs. A waiting process has one connection, and no other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from reproduction.render.tracking.location import Location, TrackingError, printable
from rotquant.foundation.files import short_hash

if TYPE_CHECKING:
    from sqlalchemy import Connection

Turn = Callable[[str | None], object]
"""Give back the turn that one has and wait for that of another name; None: for no other."""

#: Minutes to wait for a turn, longer than showing all tables takes; and seconds without a sign of life after which
#: the machine of the process that has it is given up.
_PATIENCE = 10
_SILENCE = 60


@contextmanager
def turns(location: Location) -> Iterator[Turn]:
    """Connect to a database server, once and without MLflow's minutes of retries.

    Only PostgreSQL has turns; the others are only known to be reachable.

    Raises:
        SQLAlchemyError, ImportError: the server or its driver is missing.
    """
    from sqlalchemy import NullPool, create_engine

    engine = create_engine(location.uri, poolclass=NullPool)
    with engine.connect() as connection:

        def turn(name: str | None) -> None:
            connection.rollback()
            if name is not None and engine.dialect.name == "postgresql":
                _wait(location, connection, f"rotquant {name}")

        yield turn


def _wait(location: Location, connection: "Connection", name: str) -> None:
    from sqlalchemy import text
    from sqlalchemy.exc import OperationalError

    for setting, value in {
        "lock_timeout": f"{_PATIENCE}min",
        "idle_in_transaction_session_timeout": 0,
        "tcp_keepalives_idle": _SILENCE // 2,
        "tcp_keepalives_interval": _SILENCE // 6,
        "tcp_keepalives_count": 3,
    }.items():
        connection.execute(text(f"SET LOCAL {setting} = '{value}'"))
    try:
        number = int(short_hash(name), 16) - 2**63
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": number})
    except OperationalError as error:
        if "lock timeout" not in str(error):
            raise
        raise TrackingError(
            f"another process has been writing to the MLflow store {printable(location.uri)} for {_PATIENCE} minutes."
        ) from None

"""Worker processes whose server is ended under them."""

import multiprocessing.process

import pytest

from reproduction.run.workers import Workers
from rotquant.foundation.errors import RotquantError


@pytest.mark.parametrize("times", [1, 2])
def test_a_server_that_is_ended_while_it_forks_a_worker_is_started_once_more(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, ended = multiprocessing.process.BaseProcess.start, [EOFError] * times

    def starts(process: multiprocessing.process.BaseProcess) -> None:
        if ended:
            raise ended.pop()
        start(process)

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", starts)
    with Workers[int, int](1, abs) as workers:
        if times == 2:
            with pytest.raises(RotquantError, match="was ended twice; start again"):
                workers.give(-2)
            return
        workers.give(-2)
        outcomes = [*workers.outcomes(60)]
    assert outcomes == [(-2, 2)]

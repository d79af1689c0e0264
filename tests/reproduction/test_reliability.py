"""docs/reliability.md says what the trials recorded, and a trial that fails or is skipped leaves no record."""

import json
from pathlib import Path

import pytest

from tests.trials import page, trial


def test_the_page_is_that_of_the_records() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "python -m tests.trials.page"


def test_records_are_of_whole_trials_that_held() -> None:
    for path in trial.RECORDS.glob("*.json"):
        record = json.loads(path.read_text())
        assert record["trial"] == path.stem in page.TRIALS
        assert not record["quick"]
        assert all(0 < one["held"] == one["tried"] for one in record["checks"].values())


@pytest.mark.parametrize(
    ("held", "status", "recorded"),
    [([True, True], 0, True), ([True, False], 1, False), ([], 1, False), (None, 0, False)],
)
def test_only_a_trial_of_which_all_held_is_recorded(
    held: list[bool] | None, status: int, recorded: bool, tmp_path: Path, capsys
) -> None:
    def body(under_way: trial.Trial) -> None:
        if held is None:
            raise trial.Skip("there is no cluster here.")
        for one in held:
            under_way.check("It holds", one)

    with pytest.raises(SystemExit) as end:
        trial.run("chaos", "summary", body, ["--record"], tmp_path)
    assert (end.value.code, (tmp_path / "chaos.json").exists()) == (status, recorded)
    assert ("skipped: there is no cluster here." in capsys.readouterr().out) == (held is None)

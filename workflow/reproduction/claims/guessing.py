"""Scores of a network that knows nothing: accuracy cannot rank two networks at that level.

For a task with choices it is the accuracy of guessing, for a written answer the share of the commonest one, for an
average the mean over its tasks. Log-odds of right answers are judged by the accuracy on the same items: of two
networks that know nothing, the one less sure of its guesses has the higher log-odds.
"""

from statistics import fmean

from reproduction.metrics.settings import Metric
from reproduction.tables.quantities import AVERAGE, LOG_ODDS
from reproduction.tasks.settings import ZeroShot
from reproduction.tasks.suites import TASKS, log_odds_of, task_names

#: Share of the shipped items with the commonest answer, in percent. For the papers' own tasks 0 is used.
COMMONEST = {"last_word": 5.87, "complete_line": 1.58, "complete_import": 2.56, "complete_return": 10.0}


def knowing_nothing(metric: Metric, quantity: str) -> tuple[str, float] | None:
    """The accuracy for a quantity, itself or that of its log-odds' items, and the score of knowing nothing, in percent.

    None for a quantity that is neither.

    Args:
        quantity: its key in result files.
    """
    if not isinstance(metric, ZeroShot):
        return None
    known = {name: TASKS[metric.suite][name].chance for name in task_names(metric)}
    written = COMMONEST if metric.suite == "shipped" else {}
    scores = {name: chance or written.get(name, 0.0) for name, chance in known.items() if chance is not None}
    accuracy = AVERAGE.name if quantity == LOG_ODDS.name else quantity.removesuffix(log_odds_of(""))
    if scores and accuracy == AVERAGE.name:
        return accuracy, fmean(scores.values())
    return (accuracy, scores[accuracy]) if accuracy in scores else None

"""What the trials of several GPUs of one host share: two GPUs, or in the quick form a CPU in their place."""

import torch

from reproduction.run.workers import visible_gpus
from tests.trials.trial import Skip, Trial


def two_gpus(trial: Trial) -> list[str]:
    """The first two GPUs, named in the trial's record; none where there are less and the trial is a quick one.

    Raises:
        Skip: a whole trial finds less than two.
    """
    gpus = visible_gpus()[:2]
    if len(gpus) == 2:
        trial.versions["GPUs"] = ", ".join(torch.cuda.get_device_name(index) for index in (0, 1))
        return gpus
    if not trial.quick:
        raise Skip("it takes two NVIDIA GPUs; --quick tries it out on a CPU.")
    return []

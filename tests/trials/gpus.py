"""What the trials of several GPUs of one host share: their GPUs, or in the quick form a CPU in their place."""

import torch

from reproduction.run.workers import visible_gpus
from tests.trials.trial import Skip, Trial


def several_gpus(trial: Trial, most: int = 2) -> list[str]:
    """The first GPUs, from two to `most`, named in the trial's record; none where there is one and the trial is quick.

    Raises:
        Skip: a whole trial finds less than two.
    """
    gpus = visible_gpus()[:most]
    if len(gpus) > 1:
        trial.versions["GPUs"] = ", ".join(torch.cuda.get_device_name(index) for index in range(len(gpus)))
        return gpus
    if not trial.quick:
        raise Skip("it takes two NVIDIA GPUs; --quick tries it out on a CPU.")
    return []

"""What the profile of a cluster needs of this environment, checked before Snakemake reads it."""

from importlib.util import find_spec

from rotquant.foundation.errors import ConfigError


def check_executor() -> None:
    """Refuse to start without Snakemake's executor for SLURM, for whose lack Snakemake names a choice that is invalid.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("snakemake_executor_plugin_slurm") is None:
        raise ConfigError(
            "the profile slurm needs Snakemake's executor for SLURM, which is not installed: "
            "`pip install snakemake-executor-plugin-slurm`, or the project with its extra, `pip install -e .[slurm]`."
        )

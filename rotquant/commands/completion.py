"""What a shell completes arguments with (`rotquant --install-completion`): names that a user would look up else."""

from rotquant.recipes.presets import all_presets


def methods() -> list[str]:
    """The methods of `rotquant methods`."""
    return list(all_presets())


def corpora() -> list[str]:
    """Texts that are known by a name; the shell adds files and folders."""
    return ["wikitext2"]


def splits() -> list[str]:
    """The parts of a text."""
    return ["train", "validation", "test"]

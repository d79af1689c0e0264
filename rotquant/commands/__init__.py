"""The command line's sub-commands. Each module imports torch and transformers in its commands, so `--help` is fast."""

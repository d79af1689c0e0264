"""The command line's sub-commands. Each module imports torch and transformers inside its commands, so `--help` is instant."""

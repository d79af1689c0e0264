"""What the whole house stands on and nothing of the field: errors, files, progress, frozen data, the environment."""

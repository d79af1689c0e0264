"""The current plan of a project: its tables expanded into runs once per configuration and state of the sources."""

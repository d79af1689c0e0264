"""Modules without anything of the field, on which all others build: errors, files, progress, frozen data, the
environment."""

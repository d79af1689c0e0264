"""Tests of the library, which know nothing of tables and the workflow."""

"""Imports of the commands that render, and the project of the plan that ROTQUANT_PLAN names, with all of its runs."""

import os
from pathlib import Path

import matplotlib.backends.backend_svg  # noqa: F401
import pandas  # noqa: F401
import scipy.stats  # noqa: F401

import reproduction.claims.claims
import reproduction.render.figures.draw
import reproduction.render.pages.markdown
import reproduction.render.pages.runs  # noqa: F401
from reproduction.commands.runs import open_project

if plan := os.environ.get("ROTQUANT_PLAN"):
    project = open_project(None, Path(plan))
    _ = project.places

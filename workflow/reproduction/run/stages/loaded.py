"""Imports that every computing stage needs, which take seconds: workers are forked from a process that has done them.
None of them initializes a GPU, which a forked process could not use then.
"""

# ruff: noqa: F401, I001
import reproduction.identity.code  # first: it computes the digest of all code before the code is loaded
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto

import reproduction.run.stages.rotations
import reproduction.run.stages.runs
import reproduction.run.stages.weights
import rotquant.weights.build
import rotquant.weights.storage

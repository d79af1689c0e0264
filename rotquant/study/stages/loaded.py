"""Importing this module imports what every computing stage needs and takes seconds: workers are forked from a process
that has done so. Nothing of it asks for a GPU, which a forked process could not use then.
"""

# ruff: noqa: F401, I001
import rotquant.identity.code  # first: it takes the digest of all code before the code is loaded
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto

import rotquant.study.stages.rotations
import rotquant.study.stages.runs
import rotquant.study.stages.weights
import rotquant.weights.build
import rotquant.weights.storage

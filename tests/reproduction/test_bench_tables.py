"""Every cell of every speed table runs on the meta device: shapes, types and operators fit, and nothing is computed."""

import sys

import pytest
import torch

from reproduction.benchmarks import attention, layers, peers, rows
from reproduction.benchmarks.arguments import (
    CalibrateArguments,
    DecodeAttentionArguments,
    FakeQuantizeArguments,
    LearnRotationsArguments,
    LinearArguments,
    QuantizeArguments,
    RoundRowsArguments,
)
from reproduction.benchmarks.shapes import decoder_config, shape_config
from reproduction.tables.speed.definitions import SpeedTable
from rotquant.foundation.errors import KernelError
from tests.helpers.project import shipped_project

TABLES = {name: table for name, table in shipped_project().tables.items() if isinstance(table, SpeedTable)}
META = torch.device("meta")


@pytest.mark.parametrize("table", [name for name, table in TABLES.items() if table.cells])
def test_every_cell_can_be_built_at_its_true_size(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # what is not installed anywhere
    monkeypatch.setitem(sys.modules, "humming", None)
    monkeypatch.setattr(
        attention, "fastest_attention", lambda q, k, v: torch.nn.functional.scaled_dot_product_attention
    )
    for kernel in (layers.gemm.launch_gemm, layers.gemv.launch_gemv):
        # A forced kernel is no operator and has no rule for shapes.
        monkeypatch.setattr(sys.modules[kernel.__module__], kernel.__name__, lambda *tensors: None)
    # torch's rule asks tensors without memory which device they stand for.
    monkeypatch.setattr(torch, "_weight_int4pack_mm", lambda x, weight, *_: x.new_empty(len(x), 8 * len(weight)))
    for arguments in {cell.key: cell.arguments for cell in TABLES[table].cells}.values():
        if isinstance(arguments, LinearArguments) and arguments.implementation in peers.BUILDERS:
            with pytest.raises(KernelError, match="is not installed here"):
                layers.linear_case(arguments, META)
        elif isinstance(arguments, LinearArguments):
            y = layers.linear_case(arguments, META)()
            assert y.shape == (arguments.tokens, arguments.out_features), arguments
        elif isinstance(arguments, QuantizeArguments) and arguments.implementation != "copy":
            codes, *_ = rows.quantize_case(arguments, META)()
            packed = arguments.output in ("packed", "mxfp4", "nvfp4") and arguments.implementation == "ours"
            assert codes.shape == (arguments.rows, arguments.features // (2 if packed else 1)), arguments
        elif isinstance(arguments, DecodeAttentionArguments):
            if arguments.implementation.startswith("int4"):
                y = attention.int4_case(arguments, META, getattr(arguments, "prefix", 0))()
                assert y.shape == (arguments.batch, arguments.heads, arguments.head_dim), arguments
        elif isinstance(arguments, FakeQuantizeArguments):
            if arguments.implementation not in ("copy", "compiled"):
                found = rows.fake_quantize_case(arguments, META)()
                first = found if arguments.phase == "forward" else found[0]
                assert first.shape == (arguments.out_features, arguments.in_features), arguments
        elif isinstance(arguments, RoundRowsArguments):
            if arguments.implementation == "torch":
                first, *_ = rows.round_rows_case(arguments, META)()
                assert first.shape == (arguments.out_features, arguments.in_features), arguments
        elif isinstance(arguments, LearnRotationsArguments | CalibrateArguments):
            assert shape_config(arguments.shape).num_hidden_layers
        elif hasattr(arguments, "shape"):
            assert decoder_config(arguments.shape).layers


@pytest.mark.parametrize("features", [11008, 13824])
def test_no_peer_has_these_transforms(features: int) -> None:
    arguments = {cell.key: cell.arguments for cell in TABLES["kernels_h200"].cells}.values()
    peers = [
        a
        for a in arguments
        if getattr(a, "features", None) == features and a.implementation in ("fast-hadamard-transform", "hadacore")
    ]
    assert len(peers) == 2
    for a in peers:
        with pytest.raises(KernelError):
            rows.transform_call(a)

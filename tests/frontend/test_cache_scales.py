"""Which scales a KV cache of eight bits gets, by the options and by what the checkpoint has and says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Written, write_quantized

from ingot.ir.errors import CheckpointError, OptionError

HEADS, LAYERS = 2, 1  # of the checkpoint of `quantized_files`


def write_scales(folder: Path, scheme: tuple[str, str] | None) -> Written:
    """A checkpoint of floats with the scales of its caches, described by this (type, strategy) as compressed-tensors
    writes it; None: without scales."""
    described: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    kind, strategy = scheme or ("float", "tensor")
    described["kv_cache_scheme"] = {
        "num_bits": 8, "type": kind, "symmetric": True, "group_size": None, "strategy": strategy, "dynamic": False,
        "observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None,
    }  # fmt: skip
    written = write_quantized(folder / "m", described, lambda module, weight: None)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(LAYERS) if scheme is not None else ():
            for part, value in (("k", 0.5), ("v", 0.25)):
                shape = (1,) if strategy == "tensor" else (HEADS, 1, 1)
                tensors[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.full(shape, value)

    return written.rewrite(edit)


@pytest.mark.parametrize(
    ("scheme", "dtype", "scales", "per_token"),
    [
        (None, "auto", "auto", False),
        (None, "fp8", "auto", False),
        (None, "fp8", "tensor", False),
        (None, "fp8", "token", True),
        (None, "int8", "auto", True),
        (None, "int8", "token", True),
        (("float", "tensor"), "fp8", "auto", False),
        (("float", "tensor"), "fp8", "tensor", False),
        (("float", "tensor"), "int8", "auto", True),
        (("int", "tensor"), "int8", "auto", False),
        (("int", "tensor"), "int8", "tensor", False),
        (("int", "tensor"), "fp8", "auto", True),
        (("float", "attn_head"), "auto", "auto", False),
        (("float", "attn_head"), "fp8", "auto", True),
        (("int", "attn_head"), "int8", "token", True),
    ],
)
def test_which_scales_a_cache_gets(
    tmp_path: Path, scheme: tuple[str, str] | None, dtype: str, scales: str, per_token: bool
) -> None:
    """The calls of attention have the checkpoint's, the pass says whether they are used, and a note if they are not."""
    request = write_scales(tmp_path, scheme).request(kv_cache_dtype=dtype, kv_cache_scales=scales)
    made = next(one for phase in request.pipeline() for one in phase.passes if one.name == "insert-paged-kv")
    assert (made.kv_cache_dtype, made.per_token) == (dtype, per_token)  # type: ignore[attr-defined]
    model = request.trace()
    attention = next(node for node in model.entries["main"].calls() if "attention" in str(node.target))
    given = {name: value for name, value in attention.kwargs.items() if name in ("k_scale", "v_scale")}
    assert given == ({"k_scale": 0.5, "v_scale": 0.25} if scheme is not None and scheme[1] == "tensor" else {})
    notes = [one for one in request.notes(model) if "scales of the KV cache" in one]
    assert len(notes) == (scheme is not None and per_token)


@pytest.mark.parametrize(
    ("scheme", "options", "problem"),
    [
        (None, {"kv_cache_scales": "row"}, "unknown kv_cache_scales 'row'"),
        (None, {"kv_cache_scales": "token"}, "kv_cache_scales 'token' with kv_cache_dtype 'auto', which has no scales"),
        (None, {"kv_cache_dtype": "fp8", "kv_cache_scales": "head"}, "no op reads a scale for each head"),
        (
            None,
            {"kv_cache_dtype": "int8", "kv_cache_scales": "tensor"},
            "the checkpoint has no scales for its KV cache",
        ),
        (("float", "tensor"), {"kv_cache_dtype": "int8", "kv_cache_scales": "tensor"}, "are for fp8, and .* is 'int8'"),
        (("int", "tensor"), {"kv_cache_dtype": "fp8", "kv_cache_scales": "tensor"}, "are for int8, and .* is 'fp8'"),
        (("float", "attn_head"), {"kv_cache_dtype": "fp8", "kv_cache_scales": "tensor"}, "for each head"),
    ],
)
def test_options_that_do_not_fit_the_checkpoint(
    tmp_path: Path, scheme: tuple[str, str] | None, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(OptionError, match=problem):
        write_scales(tmp_path, scheme).request(**options)


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (torch.tensor([float("nan")]), "is nan"),
        (torch.tensor(0.0), r"is 0\.0"),
        (torch.tensor([-1.0]), r"is -1\.0"),
        (torch.tensor([0.5, 0.5, 0.5]), r"is of shape \[3\]"),
        (torch.ones(2, 2, 1), r"is of shape \[2, 2, 1\]"),
    ],
)
def test_scales_that_are_no_scales(tmp_path: Path, scale: torch.Tensor, problem: str) -> None:
    written = write_scales(tmp_path, ("float", "tensor"))
    written.rewrite(lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": scale}))
    with pytest.raises(CheckpointError, match=problem):
        written.request(kv_cache_dtype="fp8").trace()

"""vLLM's names of quantization: formats for floats, and methods of quantized checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.cli.progress import no_progress
from ingot.compile.cached import keep_quantized
from ingot.frontend.quantized.readers import READERS
from ingot.ir.errors import OptionError
from ingot.ir.formats import FORMATS, find_format
from ingot.vllm_api import EngineArgs, FlexibleArgumentParser
from ingot.vllm_api import quantization as names
from ingot.vllm_api.quantization import read_quantization

KNOWN = sorted({*names._FORMATS, *names._METHODS})


@pytest.mark.parametrize("name", KNOWN)
def test_a_name_is_a_format_or_methods_that_are_read(name: str) -> None:
    found = read_quantization(name)
    assert found.format is None or (found.format in FORMATS and not find_format(found.format).lossless)
    assert {*found.methods} <= {*READERS, "gguf"} and (found.format or found.methods)


def test_each_method_that_is_read_has_its_own_name() -> None:
    others = {"intel/auto-round"}  # a quant_method that is no name of vLLM
    for method in READERS.keys() - others:
        assert method in read_quantization(method).methods


def test_no_name_is_refused_and_taken() -> None:
    assert not names._REFUSED.keys() & {*KNOWN}


def test_the_command_line_takes_it() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert EngineArgs.from_cli_args(parser.parse_args(["--quantization", "fp8"])).quantization == "fp8"


def config(folder: Path, **fields: Any) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_a_checkpoint_of_floats_is_rounded(tmp_path: Path) -> None:
    model, options = config(tmp_path), {"quantize": "fp8", "max_seq_len": 64}
    assert keep_quantized(model, options, ["fp8"], no_progress) == (model, options)
    with pytest.raises(OptionError, match="the checkpoint is not quantized") as caught:
        keep_quantized(model, {}, ["gptq", "awq"], no_progress)
    assert "gptq or awq" in str(caught.value)


def test_a_checkpoint_that_the_method_quantized_keeps_its_weights(tmp_path: Path) -> None:
    model = config(tmp_path, quantization_config={"quant_method": "fp8"})
    options = {"quantize": "fp8", "max_seq_len": 64}
    assert keep_quantized(model, options, ["fp8"], no_progress) == (model, {"max_seq_len": 64})
    for other in (["awq"], []):
        with pytest.raises(OptionError, match="the checkpoint is quantized by 'fp8'"):
            keep_quantized(model, options, other, no_progress)


def test_a_checkpoint_of_the_hub_is_the_commit_that_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(folder=config(tmp_path), origin="org/name@0123")
    monkeypatch.setattr("ingot.compile.cached.find_source", lambda name, revision, progress: found)
    options = {"quantize": "fp8", "revision": "main"}
    assert keep_quantized("org/name", options, ["fp8"], no_progress) == ("org/name@0123", {"quantize": "fp8"})

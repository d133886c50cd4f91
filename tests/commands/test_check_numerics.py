"""`compile-model --check-numerics`: the table, the warnings, and a breach that leaves nothing."""

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny import TINY

import ingot.cli.main as cli
from ingot.ir.artifact.record import Numerics
from ingot.passes.merge_linears import MergeLinears

OPTIONS = ["--backend", "reference", "--max-batch", "2", "--max-tokens", "32", "--max-seq-len", "40", "-j", "1"]


def compiled(checkpoint: Path, output: Path, *options: str) -> int:
    return cli.run(cli.COMPILE_MODEL, [str(checkpoint), "-o", str(output), *OPTIONS, *options])


def test_the_table_and_the_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In float16, with a layer that overflows and a gain as large as Qwen3-0.6B's K norm has: warnings alone."""
    folder = TINY["llama-plain"].write(tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    for name in ("gate", "up"):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"] *= 300
    tensors["model.layers.2.input_layernorm.weight"][4] = 96.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert compiled(folder, tmp_path / "m.ingot", "--check-numerics", "--dtype", "float16") == 0
    said = capsys.readouterr().out
    numerics = said[said.index("\nNumerics\n") : said.index("\nMemory\n")]
    assert "every contract is kept, on requests of 33, 17 tokens" in numerics
    row = r"^merge-linears +main +rounding +\S+ +\S+ +\S+ +\S+ +\d+ logits were not finite before$"
    assert re.search(row, numerics, re.MULTILINE)
    assert re.search(r"^insert-ending +main +exact +0 +0 +0 +0 ", numerics, re.MULTILINE)
    assert re.search(r"^cse +main +exact +program unchanged$", numerics, re.MULTILINE)
    assert re.search(r"warning: the model itself overflows in main: %silu_mul_1 .* in layer 1 overflows f16", numerics)
    gain = r"^layers\.\*\.attention_norm\.weight +largest gain +96\.5 +6 +2 +1 of 3 +folding the gain"
    assert re.search(gain, numerics, re.MULTILINE)
    assert "arXiv 2208.07339" in numerics
    assert (tmp_path / "m.ingot" / "trace" / "numerics.json").is_file()


def test_a_breach_ends_the_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = TINY["llama-plain"].write(tmp_path / "checkpoint")
    monkeypatch.setattr(MergeLinears, "numerics", Numerics.EXACT)
    assert compiled(folder, tmp_path / "m.ingot", "--check-numerics") == cli.OUR_FAULT
    said = capsys.readouterr().err
    assert "error: pass merge-linears broke its numerics contract, exact: declared exact, but values differ" in said
    assert "program main; first at %" in said and "--passes default,-merge-linears compiles without it" in said
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]

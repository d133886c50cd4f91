"""The export to torch: a program that plain torch runs equals the reference bit by bit, for any sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drawn import in_one_of
from exported_model import program_of
from quantized_files import MODEL
from tiny import TINY

from ingot.export.export import export_model
from ingot.export.source import read_source
from ingot.ir.errors import ExportError
from ingot.ir.interpret import interpret

RUN = """
import sys, torch
program = torch.export.load(sys.argv[1]).module()
given = torch.load(sys.argv[2], weights_only=True)
torch.save([program(*inputs.values())["logits"] for inputs in given], sys.argv[3])
assert not any(name.partition(".")[0] == "ingot" for name in sys.modules)
"""


def steps(vocab: int) -> list[dict[str, torch.Tensor]]:
    """Two sequences in a step, and a single token."""
    draw = torch.Generator().manual_seed(3)
    return [
        {
            "tokens": torch.randint(0, vocab, (33,), generator=draw),
            "positions": torch.cat((torch.arange(20), torch.arange(13))),
            "token_seqs": (torch.arange(33) >= 20).int(),
            "logit_rows": torch.tensor([1, 19, 32]),
        },
        {name: torch.zeros(1) for name in ("tokens", "positions", "token_seqs", "logit_rows")},
    ]


def check(checkpoint: Path, folder: Path, **options: str) -> None:
    export_model(checkpoint, folder / "out", to="torch", **options)
    program, values = program_of(read_source(str(checkpoint), options=options))
    interface = json.loads((folder / "out" / "interface.json").read_text())
    types = program.input_types()
    assert interface["inputs"] == {name: str(one) for name, one in types.items()}
    vocab = program.output_nodes()["logits"].meta["type"].shape[-1]
    inputs = [{name: given[name].to(one.dtype) for name, one in types.items()} for given in steps(vocab)]
    torch.save(inputs, folder / "inputs.pt")
    command = [sys.executable, "-c", RUN, folder / "out" / "main.pt2", folder / "inputs.pt", folder / "found.pt"]
    # Outside the checkout, so that nothing of Ingot could be imported by accident.
    subprocess.run(list(map(str, command)), check=True, cwd=folder, capture_output=True)
    for found, given in zip(torch.load(folder / "found.pt", weights_only=True), inputs, strict=True):
        assert torch.equal(found, interpret(program, {**values, **given})["logits"])


@in_one_of(4)
def test_plain_torch_runs_it_like_the_reference(tmp_path: Path) -> None:
    check(MODEL.write(tmp_path / "ck"), tmp_path)


@pytest.mark.slow
def test_quantized_weights_stay_so(tmp_path: Path) -> None:
    check(MODEL.write(tmp_path / "ck"), tmp_path, quantize="int4_g32")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text-new", "bloom-tied", "gemma3n_text-shared"])
def test_families(tmp_path: Path, name: str) -> None:
    check(TINY[name].write(tmp_path / "ck"), tmp_path)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = TINY["mixtral-window"].write(tmp_path / "ck")
    with pytest.raises(ExportError, match=r"ingot\.experts has no form in torch\.export"):
        export_model(checkpoint, tmp_path / "out", to="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]

"""Every architecture quantized on a mesh of two ranks: it computes what one device does, or is refused by name."""

import itertools
from pathlib import Path

import pytest
import torch
from drawn import drawn
from even_sizes import EVEN
from sharded import open_model
from staged import logits_of, staged

from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import IngotError
from ingot.ir.numerics.contracts import Measured, breach
from ingot.ir.numerics.tolerances import compare
from ingot.ir.program import Model, Program
from ingot.models.architectures import ARCHITECTURES
from ingot.passes.pipeline import edit_pipeline, pipeline_for

MESH = {"tp": 2}
FORMATS = ("int8", "int8_tensor", "int8_g32", "int4_g32_asym")
QUANTIZED = ("qweight", "scales", "zeros")
# What is refused, by architecture and format, and words of its error. A family that cannot be split says so here.
REFUSED: dict[tuple[str, str], str] = {}

pytestmark = pytest.mark.xdist_group("quantized mesh")


def requests(vocab: int) -> list[list[int]]:
    """One token, past a page of 16, past two."""
    return [
        [(index * 37 + place * place * 11 + 5) % vocab for place in range(n)] for index, n in enumerate((1, 17, 33))
    ]


def fused(model: Model, passes: str, mesh: dict[str, int]) -> Program:
    return staged(model, edit_pipeline(passes, pipeline_for(mesh)), mesh=mesh)[1].fused


def log_probabilities(measured: Measured) -> torch.Tensor:
    return measured.exact.double().log_softmax(-1)


def weights(program: Program, split: bool) -> list[str]:
    """The quantized params; with `split` those of which a rank has a part."""
    return [
        name
        for name, spec in program.params.items()
        if name.rpartition(".")[2] in QUANTIZED and (spec.placement or not split)
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("architecture", "format"), drawn(2, itertools.product(EVEN, FORMATS)))
def test_ranks_compute_what_one_device_does(architecture: str, format: str, tmp_path: Path) -> None:
    """The same results up to the order of sums, and so the same distance from the model as it was stored."""
    model, read = open_model(EVEN[architecture].write(tmp_path / "checkpoint"))
    passes = f"default,quantize{{format={format}}}"

    def measured(program: Program) -> Measured:
        return logits_of(program, read, requests(model.spec.vocab_size))

    alone = fused(model, passes, {})
    try:
        on_mesh = fused(model, passes, MESH)
    except IngotError as error:
        assert error.exit_code == 2 and error.where, "an error of the user's, which says where"
        assert REFUSED.get((architecture, format), "not refused") in str(error)
        return
    assert (architecture, format) not in REFUSED
    assert weights(alone, split=False), "nothing was quantized"
    assert [name for name in weights(on_mesh, split=True) if name.endswith(".qweight")], "nothing was split"
    found, wanted = measured(on_mesh), measured(alone)
    assert compare(found.exact, wanted.exact, torch.float64, factor=100) is None
    assert breach(Numerics.ROUNDING, wanted, found, torch.float32) is None
    stored = log_probabilities(measured(model.entries["main"]))
    lost, lost_alone = (float((log_probabilities(one) - stored).abs().max()) for one in (found, wanted))
    assert lost_alone > 0 and lost <= 1.001 * lost_alone


def test_every_architecture_is_there(tmp_path: Path) -> None:
    """In sizes that divide, which its reader takes: a family of other fields needs a line in even_sizes.py."""
    assert EVEN.keys() == ARCHITECTURES.keys()
    assert [name for name, tiny in EVEN.items() if not tiny.name.endswith("-even")] == []

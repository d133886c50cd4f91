"""Entries that a bisection refuses, each by name, with the reason and with what works instead."""

import pytest
import torch
from torch import fx

from ingot.debug.bisect.unjudged import refuse_unjudged
from ingot.ir import build, ops
from ingot.ir.errors import OptionError
from ingot.ir.features import EndingUse
from ingot.ir.program import Program, Stage
from ingot.ir.types import TensorType


def _program(ending: EndingUse, output: str, mask: str = "causal", reads: str = "positions") -> Program:
    program = Program("other", Stage.TRACED, {}, ending=ending)
    shape = TensorType(torch.float32, (4, 2, 8))
    q: fx.Node = program.add_input("hidden", shape) if reads == "hidden" else program.add_input("tokens", shape)
    rows = [program.add_input(name, TensorType(torch.int32, (4,))) for name in ("positions", "token_seqs")]
    options = {"scale": 1.0, "layer": 0, "mask": mask}
    program.set_outputs({output: build.call(program, ops.attention.overload, (q, q, q, *rows), options)})
    return program


@pytest.mark.parametrize(
    ("program", "said", "instead"),
    [
        (_program(EndingUse("pool"), "hidden"), "makes vectors", "check_numerics"),
        (_program(EndingUse("propose"), "proposed"), "'propose' and gives no logits", "ingot verify"),
        (_program(EndingUse(), "logits", reads="hidden"), "'sample' and reads hidden", "ingot verify"),
        (_program(EndingUse("verify", (("drafted", 3),)), "logits"), "feeds up to 4 tokens", "check_numerics"),
        (_program(EndingUse("verify_tree", (("drafted", 2),)), "logits"), "feeds up to 3 tokens", "check_numerics"),
        (_program(EndingUse("block"), "logits"), "feeds up to 8 tokens", "check_numerics"),
        (_program(EndingUse(), "logits", "block_causal_4"), "see what is fed after them", "check_numerics"),
        (_program(EndingUse(), "logits", "bidirectional"), "see what is fed after them", "check_numerics"),
    ],
)
def test_it_is_refused(program: Program, said: str, instead: str) -> None:
    with pytest.raises(OptionError, match=f"the entry 'other' .*{said}") as caught:
        refuse_unjudged(program, "here")
    assert caught.value.where == "here" and "sample one token" in caught.value.expected
    assert instead in caught.value.hint


def test_a_decoder_is_judged() -> None:
    for mask in ("causal", "window_4", "chunked_4"):
        refuse_unjudged(_program(EndingUse(), "logits", mask), "here")

"""insert-ending: positions come from device rows; the program samples and moves the rows on."""

from collections.abc import Callable

import pytest

from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.errors import IngotError
from ingot.ir.program import Program
from ingot.passes.insert_ending import InsertEnding

Apply = Callable[..., tuple[Program, PassRecord]]


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(InsertEnding(), max_batch=4)
    assert record.matches == 1 and record.numerics is Numerics.EXACT


WITHOUT_CACHE = """program main stage=CACHED
dim T in [1, 8]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, %x) : f32[T, 8]
return logits=%mul
"""
WITHOUT_LOGITS = """program main stage=CACHED
dim T in [1, 8]
dim pages in [1, 9]
input k: f32[T, 1, 8]
input slots: i64[T]
state kv.0: paged_kv f32[pages, 2, 16, 1, 8] group=full unit=token
%kv_append = ingot.kv_append(%kv.0, %k, %k, %slots) : state<kv.0>
return hidden=%k, kv.0=%kv_append
"""


def ending(text: str) -> str:
    return WITHOUT_CACHE.replace("CACHED\n", f"CACHED\nending {text}\n")


REFUSED = {
    "no logits": (WITHOUT_LOGITS, r"(?s)the ending 'sample' needs the output 'logits'.*entry main.*returns logits"),
    "an unknown ending": (ending("rank"), "unknown ending 'rank'"),
    "an unknown attribute": (ending("sample(drafted=2)"), "'drafted'"),
    "blocks without a mask token": (ending("block(block=8)"), "mask_token is -1"),
    "blocks that do not fill a sequence": (ending("block(block=7, mask_token=3)"), "takes 7 tokens at once"),
    "an unknown feature": (ending("sample(colour)"), "feature 'colour'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_end_so(apply: Apply, case: str) -> None:
    text, said = REFUSED[case]
    with pytest.raises(IngotError, match=said):
        apply(InsertEnding(), text)

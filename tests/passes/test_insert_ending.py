"""insert-ending: positions come from device rows; the program samples and moves the rows on."""

from collections.abc import Callable

import pytest

from ingot.ir.errors import PassError
from ingot.ir.program import Program
from ingot.ir.record import Numerics, PassRecord
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


@pytest.mark.parametrize("text", [WITHOUT_CACHE, WITHOUT_LOGITS], ids=["cache", "logits"])
def test_it_needs_a_cache_and_logits(apply: Apply, text: str) -> None:
    with pytest.raises(PassError, match=r"(?s)no caches or no logits.*insert-ending.*insert-paged-kv before it"):
        apply(InsertEnding(), text)

"""choose-providers: the cheapest claim wins, every No is kept, and a call that nobody takes is an error."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.backends.inductor.emit import Inductor
from ingot.backends.reference.emit import Reference, Rowwise
from ingot.ir.backend import No, Yes
from ingot.ir.errors import PassError
from ingot.ir.program import Program
from ingot.ir.record import PassRecord, Refusal
from ingot.passes.choose_providers import ChooseProviders

Apply = Callable[..., tuple[Program, PassRecord]]
TEXT = (Path(__file__).parent / "goldens" / "choose-providers.before.ir").read_text(encoding="utf-8")


def _providers(program: Program) -> dict[str, str]:
    return {node.name: node.meta["provider"] for node in program.calls() if "provider" in node.meta}


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(ChooseProviders())
    assert record.matches == 3 and record.bucket == "decode"  # an item of a tuple needs no provider
    assert record.refusals == (Refusal("embedding", "inductor: ingot.embedding stands outside regions"),)


def test_deterministic_mode_takes_batch_invariant_claims_only(apply: Apply) -> None:
    program, record = apply(ChooseProviders(), TEXT, deterministic=True)
    # A view computes nothing, so the reference may keep it.
    assert _providers(program) == {"embedding": "rowwise", "add_rms_norm": "rowwise", "view": "reference"}
    assert record.refusals == (
        Refusal("embedding", "inductor: ingot.embedding stands outside regions"),
        Refusal("embedding", "reference: not batch-invariant"),
        Refusal("add_rms_norm", "inductor: not batch-invariant"),
        Refusal("add_rms_norm", "reference: not batch-invariant"),
        Refusal("view", "inductor: not batch-invariant"),
    )


def test_without_a_region_compiler(apply: Apply) -> None:
    program, record = apply(ChooseProviders(), TEXT, backends=(Reference(), Rowwise()))
    assert set(_providers(program).values()) == {"reference"} and record.refusals == ()


def test_no_provider(apply: Apply) -> None:
    with pytest.raises(PassError) as caught:
        apply(ChooseProviders(), TEXT, backends=(Inductor(),))
    assert caught.value.what == "no backend computes ingot.embedding"
    assert caught.value.where.startswith("%embedding") and caught.value.expected == "one of inductor"
    with pytest.raises(PassError, match=r"no backend computes ingot\.embedding"):
        apply(ChooseProviders(), TEXT, backends=(Reference(),), deterministic=True)


class _Priced(Reference):
    """Takes everything at its price, and remembers what it was asked."""

    def __init__(self, name: str, cost: float) -> None:
        self.name, self.cost = name, cost  # type: ignore[misc]
        self.asked: list[tuple[str, str]] = []

    def claim(self, nodes: Sequence[Any], target: Any, bucket: Any) -> Yes | No:
        self.asked.append((nodes[0].name, bucket.name))
        return Yes(self.cost)


@pytest.mark.parametrize("cheap_first", [True, False])
def test_the_cheapest_claim_wins(apply: Apply, cheap_first: bool) -> None:
    cheap, dear = _Priced("cheap", 1.0), _Priced("dear", 2.0)
    backends = (cheap, dear) if cheap_first else (dear, cheap)
    program, _ = apply(ChooseProviders(), TEXT, backends=backends)
    assert set(_providers(program).values()) == {"cheap"}
    assert cheap.asked == dear.asked == [(name, "decode") for name in ("embedding", "add_rms_norm", "view")]


def test_of_equal_claims_the_preferred_backend_wins(apply: Apply) -> None:
    program, _ = apply(ChooseProviders(), TEXT, backends=(_Priced("first", 1.0), _Priced("second", 1.0)))
    assert set(_providers(program).values()) == {"first"}

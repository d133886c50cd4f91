"""The rules of the numerics contracts on tensors made for them, and measuring nodes of a program."""

import math

import pytest
import torch

from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import VerifyError
from ingot.ir.numerics.contracts import Measured, breach, changed_meaning, deviation, measure
from ingot.ir.numerics.tolerances import TOLERANCES
from ingot.ir.parse import parse_program

EXACT, ROUNDING, LOSSY = Numerics.EXACT, Numerics.ROUNDING, Numerics.LOSSY
F32, BF16 = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")


def measured(found: list[float], exact: list[float], dtype: torch.dtype = F32) -> Measured:
    return Measured(torch.tensor(found, dtype=dtype), torch.tensor(exact, dtype=torch.float64))


ONE = measured([1.0, 2.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("numerics", "after", "said"),
    [
        (EXACT, ONE, None),
        (EXACT, measured([1.0, 2.0 + 2**-22], [1.0, 2.0]), "declared exact, but values differ by up to 2.38e-07"),
        (EXACT, measured([1.0, 2.0], [1.0, 2.0], BF16), "values differ in torch.bfloat16, before torch.float32"),
        (EXACT, measured([1.0, 2.0], [1.0, 2.0 + 1e-8]), "the meaning changed: max error 1e-08 at [1]"),
        (EXACT, measured([1.0, 2.0], [1.0, 2.0 + 1e-11]), None),  # the order of adding in float64
        (EXACT, measured([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), "the shape is [3], before [2]"),
        (ROUNDING, measured([1.0, 2.0002], [1.0, 2.0]), None),
        (ROUNDING, measured([1.0, 2.0003], [1.0, 2.0]), "the error is 0.000212, before 0"),
        (ROUNDING, measured([1.0, NAN], [1.0, 2.0]), "the error is inf, before 0"),
        (ROUNDING, measured([1.0, 2.0], [1.0, 2.0 + 1e-8]), "the meaning changed"),
        (LOSSY, measured([1.5, 2.0], [1.5, 2.0]), None),
        (LOSSY, measured([1.5, INF], [1.5, 2.0]), "1 of 2 elements are no longer finite"),
    ],
)
def test_rules(numerics: Numerics, after: Measured, said: str | None) -> None:
    problem = breach(numerics, ONE, after, F32)
    assert problem is None if said is None else problem is not None and said in problem.text


def test_rounding_may_be_a_quarter_worse_than_before() -> None:
    """As root mean square, with that of the tolerance added."""
    before = measured([1.0, 2.1], [1.0, 2.0], BF16)
    table = TOLERANCES[BF16]
    near = [table.atol + table.rtol * value for value in (1.0, 2.0)]
    allowed = 1.25 * float(before.error[1]) / 2**0.5 + math.sqrt((near[0] ** 2 + near[1] ** 2) / 2)
    for place in (0, 1):
        for factor, kept in ((0.99, True), (1.01, False)):
            found = [1.0, 2.0]
            found[place] += factor * allowed * 2**0.5
            assert (breach(ROUNDING, before, measured(found, [1.0, 2.0]), BF16) is None) == kept
    found = breach(ROUNDING, before, measured([1.0, 2.5], [1.0, 2.0]), BF16)
    assert found is not None and found.error == pytest.approx(0.5 / 2**0.5)
    assert found.relative_error == pytest.approx(found.error / 2) and found.allowed == pytest.approx(allowed)
    numbers = deviation(ROUNDING, before, before, BF16)
    assert numbers.error == numbers.before and numbers.allowed == pytest.approx(allowed)


@pytest.mark.parametrize(("factor", "kept"), [(2.0, True), (3.9, True), (4.2, False)])
def test_one_element_may_lose_two_bits(factor: float, kept: bool) -> None:
    """The largest of many errors doubles by chance. The root mean square hardly shows a single one."""
    exact = torch.zeros(10_000, dtype=torch.float64)
    errors = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    worse = errors.clone()
    worse[17] = factor
    found = breach(ROUNDING, Measured(errors, exact), Measured(worse, exact), BF16)
    assert found is None if kept else found is not None and found.text == "the largest error is 4.2, before 1"


def test_all_roundings_drawn_again_keep_the_contract() -> None:
    """A mesh rounds every partial sum. Largest errors of tokens then scatter by more than a quarter."""
    draws = torch.Generator().manual_seed(0)
    # As measured: the root mean square of logits is 1.7 and that of their errors 0.027. A token's errors are large
    # together.
    exact = 1.7 * torch.randn(76, 256, generator=draws, dtype=torch.float64)
    kept, worse = 0, 0
    for _ in range(50):
        old, new = 0.027 * torch.randn(2, 76, 1, generator=draws) * torch.randn(2, 76, 256, generator=draws)
        before = Measured(exact + old, exact)
        kept += breach(ROUNDING, before, Measured(exact + new, exact), BF16) is None
        worse += breach(ROUNDING, before, Measured(exact + 3 * new, exact), BF16) is not None
    assert kept == worse == 50


def test_what_was_not_finite_before_is_not_judged_and_excuses_nothing() -> None:
    before = measured([INF, NAN, 2.0], [7e4, NAN, 2.0], torch.float16)
    assert breach(EXACT, before, before, torch.float16) is None
    assert breach(ROUNDING, before, measured([NAN, NAN, 2.0], [7e4, NAN, 2.0], torch.float16), torch.float16) is None
    worse = measured([INF, NAN, 2.5], [7e4, NAN, 2.0], torch.float16)
    assert str(breach(ROUNDING, before, worse, torch.float16)) == "the error is 0.5, before 0"
    assert str(breach(EXACT, before, worse, torch.float16)).endswith("differ by up to 0.5")
    numbers = deviation(ROUNDING, before, worse, torch.float16)
    assert (numbers.error, numbers.before, numbers.meaning, numbers.lost) == (0.5, 0.0, 0.0, 2)


def test_integers() -> None:
    """A sampled token may tip over where floats round otherwise, but not in float64."""
    one, other = torch.tensor([3, 4]), torch.tensor([3, 5])
    assert breach(ROUNDING, Measured(one, one), Measured(other, one), F32) is None
    assert "values differ" in str(breach(EXACT, Measured(one, one), Measured(other, one), F32))
    assert "found 5, expected 4 at [1]" in str(changed_meaning(Measured(one, one), Measured(one, other)))


PROGRAM = """program main stage=TRACED
dim T in [1, 64]
dim L in [1, 64]
input tokens: i32[T]
input logit_rows: i32[L]
param embed: bf16[20, 6] = source(name="embed")
%embedding = ingot.embedding(%tokens, %embed) : bf16[T, 6]
%select_rows = ingot.select_rows(%embedding, %logit_rows) : bf16[L, 6]
%linear = ingot.linear(%select_rows, %embed) : bf16[L, 20]
return logits=%linear
"""


def test_measure_gives_logits_and_named_nodes() -> None:
    program = parse_program(PROGRAM)
    weight = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).to(BF16)
    result = measure(program, [{"embed": weight}], [[3, 4, 5], [6]], names=["embedding"])
    rows = weight[[3, 4, 5, 6]]
    assert torch.equal(result.values["embedding"].found, rows) and result.values.keys() == {"embedding"}
    assert torch.equal(result.values["embedding"].exact, rows.double())
    assert torch.equal(result.logits.exact, rows.double() @ weight.double().T)
    assert torch.equal(result.logits.found, rows @ weight.T) and float(result.logits.error.max()) > 0
    with pytest.raises(VerifyError, match="no tensor has the name linear_7"):
        measure(program, [{"embed": weight}], [[3]], names=["linear_7"])
    with pytest.raises(VerifyError, match="values of nodes need all tokens in one step"):
        measure(program, [{"embed": weight}], [[3]], names=["linear"], chunk=1)

"""sample by Triton kernels against its reference."""

import pytest
import torch
from drawn_tokens import wrong_token
from odd_samples import odd_samples
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering, run_schedule

from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.sampling import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.ops.sampling import keep_mask
from ingot.ir.types import TensorType

_OP = OPS["sample"]
NAN, INF = float("nan"), float("inf")


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _check(*args: torch.Tensor) -> torch.Tensor:
    """The tokens, which are the reference's."""
    (found,) = run_lowering(_OP, LOWERINGS["sample"], args, {}, dims={"L": args[0].shape[0]}, tokens=(1, 128))
    found = found.cpu()
    problem = wrong_token(found, *args)
    assert problem is None, problem
    return found


def _columns(rows: int, temperature: float = 0.0) -> list[torch.Tensor]:
    """The parameters of rows without any cut."""
    off = (torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows))
    return [torch.full((rows,), temperature), *off, torch.arange(rows), torch.arange(rows, dtype=torch.int32)]


@pytest.mark.parametrize("dtype", TESTED)
def test_samples(dtype: torch.dtype) -> None:
    for sample in _OP.samples(torch.Generator().manual_seed(1), dtype) + odd_samples("sample", dtype):
        _check(*sample.args)


# Many equals, and rows that have no token; one part of a row, and several.
@pytest.mark.parametrize("vocab", [1, 7, 2048, 4099])
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_with_a_token_and_without(rows: int, vocab: int, temperature: float) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (rows, vocab), generator=g).float()
    for row, value in ((1, NAN), (2, INF), (3, -INF)):
        if row < rows:
            logits[row, int(torch.randint(0, vocab, (1,), generator=g))] = value
    if rows > 4:
        logits[4] = -INF
    columns = _columns(rows)
    columns[0][: min(rows, 6)] = temperature  # and the rest greedily
    _check(logits, *columns)


_CUTS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 3, "min_p": 0.5},
]


def _kept(*args: torch.Tensor) -> torch.Tensor:
    """bool[L, V]: what the kernels keep of rows that are drawn, by the thresholds that they leave for the last one."""
    names = _OP.parameters()
    inputs = [value.to(DEVICE) for value in args]
    values = {
        name: Value(TensorType(one.dtype, tuple(one.shape)), input=place)
        for place, (name, one) in enumerate(zip(names, inputs, strict=True))
    }
    schedule = new_schedule((1, 128))
    LOWERINGS["sample"](Call("sample", values, {}, (TensorType(torch.int32, (len(args[0]),)),)), schedule)
    last = schedule.launches[-1].arguments
    limits, last_ids = run_schedule(schedule, [last["limits"], last["last_ids"]], inputs, {})
    logits, temperature, min_p = args[0], args[1][:, None], args[4][:, None]
    depths = (logits.amax(-1, keepdim=True) - logits) / temperature
    limits, last_ids = limits.cpu()[:, None], last_ids.cpu()[:, None]
    up_to = (depths < limits) | ((depths == limits) & (torch.arange(logits.shape[1]) <= last_ids))
    return up_to & torch.isfinite(depths) & (torch.exp(-depths) >= min_p)


# What is kept, token by token, and the token drawn of it. Rounded logits have equals at every edge, flat ones are kept
# by the thousand, and the largest of a vocabulary in order stand all in one group.
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        *[(kind, cut) for kind in ("plain", "rounded") for cut in _CUTS],
        *[(kind, cut) for kind in ("flat", "ordered") for cut in _CUTS if "top_p" in cut],
    ],
    ids=str,
)
def test_cuts(kind: str, cut: dict[str, float]) -> None:
    rows, vocab = 2, 1501
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 3
    if kind == "rounded":
        logits = (logits * 2).round() / 2
    if kind == "flat":
        logits = logits / 100
    if kind == "ordered":
        logits = logits.sort(-1).values
    temperature, top_k, top_p, min_p, seeds, positions = _columns(rows, 1.3)
    top_k.fill_(int(cut.get("top_k", 0)))
    top_p.fill_(cut.get("top_p", 1.0))
    min_p.fill_(cut.get("min_p", 0.0))
    args = (logits, temperature, top_k, top_p, min_p, seeds + 2**40, positions * 1000)
    expected = keep_mask((logits - logits.amax(-1, keepdim=True)) / 1.3, top_k, top_p, min_p)
    found = _kept(*args)
    for row in range(rows):
        wrong = (found[row] != expected[row]).nonzero().flatten().tolist()
        assert not wrong, f"of {int(expected[row].sum())} in row {row}: {wrong}"
    _check(*args)


# Of equals at the edge of top-p the first that fit are kept; top-k keeps them all.
def test_equals_at_the_edge() -> None:
    rows, vocab = 30, 64
    logits = torch.full((rows, vocab), -INF)
    logits[:, 10:20] = 3.0
    temperature, top_k, top_p, min_p, seeds, positions = _columns(rows, 2.0)
    top_p[:15], top_k[15:] = 0.35, 3
    found = _check(logits, temperature, top_k, top_p, min_p, seeds, positions)
    assert set(found[:15].tolist()) == {10, 11, 12, 13}
    assert 3 < len(set(found[15:].tolist())) <= 10


# Rows of several parts and passes, drawn each in its own way and greedily among each other.
def test_mixed_rows_of_many_tokens() -> None:
    logits = torch.randn(6, 20_011, generator=torch.Generator().manual_seed(8)) * 3
    _check(
        logits,
        torch.tensor([0.0, 1.0, 0.6, 0.0, 1.1, 0.9]),
        _ints([0, 0, 50, 3, 0, 0]),
        torch.tensor([1.0, 1.0, 0.9, 0.1, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0, 0.1]),
        torch.tensor([1, 2, 2**62 + 3, 4, -5, 6]),
        _ints([0, 7, 100_000, 3, 4, 2**31 - 1]),
    )

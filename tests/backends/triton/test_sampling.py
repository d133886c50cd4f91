"""sample by Triton kernels against its reference.

A token may differ from the reference's only where the last bit of a logarithm decides: where two noisy scores are
nearer to each other than `_SCORES_TELL`.
"""

import pytest
import torch
from drawn_edits import drawn_edits
from odd_samples import odd_samples
from op_values import no_penalties
from triton_schedules import DEVICE, TESTED, new_schedule, run_schedule, some

from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.sampling.sample import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.ops import OPS
from ingot.ir.ops.penalties import NUM_PENALTIES, Penalties, penalized
from ingot.ir.ops.sampling import keep_mask, typical_mask, uniform
from ingot.ir.types import TensorType

pytestmark = pytest.mark.one_in_file(3)

_OP = OPS["sample"]
_SCORES_TELL = 1e-5  # some ulps of scores of size 16, the largest noise in float32
_SUMS_TELL = 1e-6  # some ulps of a sum of probabilities: nearer to top-p, the order of adding decides
F32, NAN, INF = torch.float32, float("nan"), float("inf")


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Steps that decode more than 64 sequences: programs take more of a row there.
_MANY_ROWS = BucketClass(name="test", tokens=(65, 128), q_max=1)


def _check(*given: torch.Tensor, bucket: BucketClass | None = None) -> torch.Tensor:
    """The tokens are the reference's, and what is kept of rows that are drawn; gives that, bool[L, V]. Where no
    penalties are given, none are asked for."""
    names = _OP.parameters.names
    args = given if len(given) == len(names) else (*given, *no_penalties(*given[0].shape))
    inputs = [value.to(DEVICE) for value in args]
    values = {
        name: Value(TensorType(one.dtype, tuple(one.shape)), input=place)
        for place, (name, one) in enumerate(zip(names, inputs, strict=True))
    }
    schedule = new_schedule((1, 128))
    schedule.bucket = bucket or schedule.bucket
    outputs = LOWERINGS["sample"](Call("sample", values, {}, (TensorType(torch.int32, (len(args[0]),)),)), schedule)
    last = schedule.launches[-1].arguments
    names = ("limits", "last_ids", "centres", "spreads")
    found, *cuts = run_schedule(schedule, [*outputs, *(last[name] for name in names)], inputs, {})
    found, (limits, last_ids, centres, spreads) = found.cpu(), [one.cpu()[:, None] for one in cuts]
    expected = _OP.reference(*args)
    assert found.dtype == torch.int32

    _, temperature, top_k, top_p, min_p, typical_p, seeds, positions = args[:-NUM_PENALTIES]
    logits = penalized(args[0], Penalties(*args[-NUM_PENALTIES:]))
    depths = (logits.amax(-1, keepdim=True) - logits) / temperature[:, None]
    up_to = (depths < limits) | ((depths == limits) & (torch.arange(logits.shape[1]) <= last_ids))
    kept = up_to & torch.isfinite(depths) & (torch.exp(-depths) >= min_p[:, None])
    wanted = keep_mask(-depths, top_k, top_p, min_p)
    before = _mass_before(-depths, keep_mask(-depths, top_k, torch.ones_like(top_p), min_p))
    wrong = (kept != wanted) & ((before - top_p[:, None]).abs() > _SUMS_TELL)
    typical = (depths - centres).abs() <= spreads
    for row in ((temperature > 0) & (expected >= 0) & (typical_p < 1)).nonzero().flatten().tolist():
        left = -depths[row : row + 1].masked_fill(~kept[row], INF)
        wrong[row] |= (
            kept[row] & (typical[row] != typical_mask(left, typical_p[row : row + 1])[0]) & ~_near(left, typical_p[row])
        )
    for row in ((temperature > 0) & (expected >= 0)).nonzero().flatten().tolist():
        assert not wrong[row].any(), f"of {int(wanted[row].sum())} in {row}: {wrong[row].nonzero().flatten().tolist()}"
    for row in (found != expected).nonzero().flatten().tolist():
        assert temperature[row] > 0 and expected[row] >= 0, f"row {row}: {found[row]}, expected {expected[row]}"
        noise = -torch.log(-torch.log(uniform(seeds[row : row + 1], positions[row : row + 1], logits.shape[1])))
        scores = noise[0] - depths[row]
        assert abs(scores[found[row]] - scores[expected[row]]) < _SCORES_TELL, f"row {row}: {found[row]}"
    return kept


def _mass_before(scaled: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """f64[L, V]: the probability of the kept tokens in front of each, in the order of top-p."""
    ordered = scaled.double().masked_fill(~kept, -INF).sort(stable=True, dim=-1, descending=True)
    probs = ordered.values.softmax(-1)
    return torch.zeros_like(probs).scatter(-1, ordered.indices, probs.cumsum(-1) - probs)


def _near(scaled: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """bool[V]: the tokens so near to the edge of typical sampling that the order of adding decides, or a rounding of
    the entropy."""
    scores = scaled[0].double().log_softmax(-1)
    probs = scores.exp()
    away = (-scores + torch.where(probs > 0, probs * scores, 0.0).sum()).abs()
    ordered = away.sort()
    mass = probs[ordered.indices].cumsum(0)
    edges = away[ordered.indices][(mass - float(typical_p)).abs() < 1e-5]
    edges = torch.cat([edges, ordered.values[(mass < float(typical_p)).sum().clamp(max=len(away) - 1)][None]])
    return ((away[:, None] - edges).abs() < 1e-5).any(-1)


def _columns(rows: int, temperature: float = 0.0) -> list[torch.Tensor]:
    """The parameters of rows without any cut."""
    off = (torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows), torch.ones(rows))
    return [torch.full((rows,), temperature), *off, torch.arange(rows), torch.arange(rows, dtype=torch.int32)]


@pytest.mark.parametrize("dtype", TESTED)
def test_samples(dtype: torch.dtype) -> None:
    for sample in _OP.samples(torch.Generator().manual_seed(1), dtype) + odd_samples("sample", dtype):
        _check(*sample.args)


# Many equals, and rows that have no token; one part of a row, and several.
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (9, 1), (70, 7), (9, 2048), (9, 4099)])
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
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"typical_p": 0.6, "top_k": 40, "min_p": 0.01},
    {"typical_p": 0.5, "top_p": 0.9},
]


# What is kept, token by token, and the token drawn of it. Rounded logits have equals at every edge, flat ones are kept
# by the thousand, and the largest of a vocabulary in order stand all in one group.
@pytest.mark.parametrize(
    ("kind", "cut"),
    some(
        8,
        [
            *[(kind, cut) for kind in ("plain", "rounded") for cut in _CUTS],
            *[(kind, cut) for kind in ("flat", "ordered") for cut in _CUTS if "top_p" in cut],
        ],
    ),
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
    temperature, top_k, top_p, min_p, typical_p, seeds, positions = _columns(rows, 1.3)
    top_k.fill_(int(cut.get("top_k", 0)))
    top_p.fill_(cut.get("top_p", 1.0))
    min_p.fill_(cut.get("min_p", 0.0))
    typical_p.fill_(cut.get("typical_p", 1.0))
    _check(logits, temperature, top_k, top_p, min_p, typical_p, seeds + 2**40, positions * 1000)


# Of equals at the edge of top-p the first that fit are kept; top-k keeps them all.
def test_equals_at_the_edge() -> None:
    rows, vocab = 4, 64
    logits = torch.full((rows, vocab), -INF)
    logits[:, 10:20] = 3.0
    temperature, top_k, top_p, min_p, typical_p, seeds, positions = _columns(rows, 2.0)
    top_p[:2], top_k[2:] = 0.35, 3
    kept = _check(logits, temperature, top_k, top_p, min_p, typical_p, seeds, positions)
    found = [row.nonzero().flatten().tolist() for row in kept]
    assert found == [list(range(10, 14))] * 2 + [list(range(10, 20))] * 2


# Rows of several parts and passes, drawn each in its own way and greedily among each other.
@pytest.mark.parametrize("bucket", some(1, [None, _MANY_ROWS]), ids=["few rows", "many rows"])
def test_mixed_rows_of_many_tokens(bucket: BucketClass | None) -> None:
    logits = torch.randn(6, 20_011, generator=torch.Generator().manual_seed(8)) * 3
    _check(
        logits,
        torch.tensor([0.0, 1.0, 0.6, 0.0, 1.1, 0.9]),
        _ints([0, 0, 50, 3, 0, 0]),
        torch.tensor([1.0, 1.0, 0.9, 0.1, 0.8, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.5, 0.0, 0.1]),
        torch.tensor([0.5, 0.9, 1.0, 1.0, 0.6, 0.8]),
        torch.tensor([1, 2, 2**62 + 3, 4, -5, 6]),
        _ints([0, 7, 100_000, 3, 4, 2**31 - 1]),
        bucket=bucket,
    )


# Rows that are penalized, banned, edited, several of these and none, drawn in each way and greedily; some of them have
# no token but for a ban. Of one part, of several, and of several that hold more.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("vocab", "dtype", "bucket"),
    some(
        2,
        [
            (1, torch.float32, None),
            (2048, torch.float16, None),
            (4099, torch.bfloat16, None),
            (9001, torch.float32, _MANY_ROWS),
        ],
    ),
    ids=["one part", "a whole part", "several", "many rows"],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_penalties(vocab: int, dtype: torch.dtype, bucket: BucketClass | None) -> None:
    g = torch.Generator().manual_seed(vocab)
    rows = 12
    logits = (torch.randn(rows, vocab, generator=g) * 5).to(dtype)
    counts = torch.randint(0, 7, (3, vocab), generator=g, dtype=torch.int32)
    counts[torch.rand(3, vocab, generator=g) < 0.7] = 0
    places = _ints([2, -1, 0, 1] * 3)
    columns = [torch.rand(rows, generator=g) * 2 + low for low in (0.1, -1, -1)]
    banned = torch.randint(-1, vocab, (rows, 16), generator=g, dtype=torch.int32)
    banned[:4] = -1
    banned[4:6, 3:] = -1
    for row, value in ((6, NAN), (7, INF)):
        logits[row, int(banned[row, 2])] = value  # what is banned spoils nothing
    temperature, _, _, min_p, typical_p, seeds, positions = _columns(rows)
    temperature[::2] = 0.8
    top_k, top_p = _ints([0, 0, 40, 0, 5, 0] * 2), torch.tensor([1.0, 1.0, 0.9, 1.0, 1.0, 1.0] * 2)
    edits, last_token = drawn_edits(g, vocab, [0, 1])
    edited = (edits, _ints([-1, 0, -1, -1, 1, -1] * 2), last_token)
    typical_p[6:] = 0.7
    drawn = (temperature, top_k, top_p, min_p, typical_p, seeds, positions)
    _check(logits, *drawn, counts, places, *columns, banned, *edited, bucket=bucket)


# What a kernel reads in the dtype of the product is what it would read behind a cast.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 2049, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    columns = _columns(5, 0.7)
    columns[1][:], columns[2][:] = _ints([0, 9, 0, 40, 0]), torch.tensor([1.0, 1.0, 0.7, 0.9, 0.0])
    assert torch.equal(_check(logits, *columns), _check(logits.float(), *columns))

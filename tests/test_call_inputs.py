"""What calls are timed on: steps within the bucket class, and inputs that an op's reference takes."""

import pytest
import torch

from ingot.compile.timing.call_inputs import TimedStep, call_of, inputs_for, timed_steps
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.errors import BackendError
from ingot.ir.ops import OPS, op_of
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.types import Dim, TensorType
from ingot.passes.call_bodies import call_body

I32, I64, BF16 = torch.int32, torch.int64, torch.bfloat16
DECODE_1, DECODE_16 = (BucketClass(name="few", tokens=tokens) for tokens in ((1, 1), (2, 16)))
WIDE = BucketClass(name="wide", tokens=(65, 512), q_max=1)
EXTEND = BucketClass(name="extend", tokens=(65, 8192))
ANY = BucketClass(name="any", tokens=(1, 256))
BUCKETS = (DECODE_1, DECODE_16, WIDE, EXTEND, ANY)


def attention(bucket: BucketClass, most_sequences: int = 256, pages: int = 256, cache: torch.dtype = BF16) -> Program:
    program = Program("main", Stage.LOWERED, {}, bucket=bucket)
    program.dims = {
        "T": Dim("T", 1, 8192),
        "B": Dim("B", 1, most_sequences),
        "P": Dim("P", 1, pages),
        "pages": Dim("pages", 1, 1 << 20),
    }
    q = program.add_input("q", TensorType(BF16, ("T", 4, 16), (128, 16, 1)))  # a part of a merged product
    kv = program.add_state("kv", StateSpec("paged_kv", "kv", "token", TensorType(cache, ("pages", 2, 16, 2, 16))))
    table = program.add_input("table", TensorType(I32, ("B", "P")))
    lens = [program.add_input(f"lens{number}", TensorType(I32, ("B",))) for number in range(3)]
    call = build.call(program, OPS["paged_attention"].overload, (q, kv, table, *lens), {"scale": 0.25})
    return call_body(program, call, "call")


@pytest.mark.parametrize("cache", [BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: str(bucket.name))
def test_a_reference_takes_the_inputs(bucket: BucketClass, cache: torch.dtype) -> None:
    body = attention(bucket, most_sequences=20, pages=8, cache=cache)
    for step in timed_steps(body):
        step = TimedStep(min(step.tokens, 64 * step.sequences), step.sequences, min(step.context, 64))  # a quick one
        inputs = inputs_for(body, step, "cpu", torch.Generator().manual_seed(0))
        q, kv, table, starts, q_lens, kv_lens = inputs
        assert q.stride() == (128, 16, 1) and q.dtype is BF16 and table.dtype is I32
        assert len(set(table.flatten().tolist())) == table.numel() == kv.shape[0], "no page is shared"
        assert int(q_lens.sum()) == q.shape[0] and bool((kv_lens >= q_lens).all()) and int(starts[-1]) < q.shape[0]
        call = call_of(body)
        op = op_of(call.target)
        assert op is not None
        result = op.reference(*inputs, **call.kwargs)
        assert bool(torch.isfinite(result).all()) and float(result.float().abs().mean()) > 1e-3


def test_steps_lie_in_the_bucket_class() -> None:
    steps = {bucket.name: timed_steps(attention(bucket)) for bucket in (DECODE_1, DECODE_16, WIDE, EXTEND)}
    assert timed_steps(attention(DECODE_1)) == (TimedStep(1, 1, 1024),)
    assert timed_steps(attention(DECODE_16)) == (TimedStep(9, 9, 1024),)
    assert steps["wide"] == (TimedStep(256, 256, 1024),), "no more sequences than a step has"
    assert steps["extend"] == (TimedStep(728, 4, 182), TimedStep(4096, 1, 4096))


@pytest.mark.parametrize("bucket", [*BUCKETS, BucketClass(name="odd", tokens=(17, 19))], ids=lambda one: str(one.name))
@pytest.mark.parametrize("pages", [1, 7, 256])
@pytest.mark.parametrize("sequences", [1, 3, 256])
def test_steps_keep_every_bound(bucket: BucketClass, sequences: int, pages: int) -> None:
    steps = timed_steps(attention(bucket, sequences, pages))
    for step in steps:
        assert step.tokens <= bucket.tokens[1] and step.sequences <= sequences
        assert step.tokens % step.sequences == 0 and step.tokens // step.sequences <= step.context <= 16 * pages
    low, _ = bucket.tokens
    reachable = sequences * (1 if bucket.q_max == 1 else 16 * pages)  # tokens that sequences of such lengths can feed
    assert steps or reachable < low


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_rows_of_a_rank(ranks: int) -> None:
    """A call of rows that ranks split is timed on as many as one rank has in the step."""
    program = Program("main", Stage.LOWERED, {"T": Dim("T", 1, 8192)}, bucket=EXTEND, mesh={"tp": ranks})
    program.dims["T_tp"] = Dim("T_tp", 1, -(-8192 // ranks))
    x, gain = program.add_input("x", TensorType(BF16, ("T_tp", 4))), program.add_input("g", TensorType(BF16, (4,)))
    body = call_body(program, build.call(program, OPS["rms_norm"].overload, (x, gain), {"eps": 0.1}), "call")
    assert str(body.dims["T_tp"]) == f"T_tp in [{-(-65 // ranks)}, {-(-8192 // ranks)}]"
    step = TimedStep(728, 4, 182)
    assert inputs_for(body, step, "cpu", torch.Generator())[0].shape == (-(-728 // ranks), 4)


def test_an_input_that_no_step_says_is_refused() -> None:
    program = Program("main", Stage.LOWERED, {"T": Dim("T", 1, 8)}, bucket=DECODE_1)
    tokens = program.add_input("tokens", TensorType(I32, ("T",)))
    table = program.add_input("table", TensorType(BF16, (10, 4)))
    body = call_body(program, build.call(program, OPS["embedding"].overload, (tokens, table), {}), "call")
    with pytest.raises(BackendError, match="steps do not define the input '") as caught:
        inputs_for(body, TimedStep(1, 1, 1), "cpu", torch.Generator())
    assert caught.value.where == "i32[T], timing a call"

"""What calls cost and who asked for how much, read from an artifact alone."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn import in_one_of
from resign import edit_json, sign

from ingot.debug.explain import _alike, explain
from ingot.debug.explained import BucketCosts, Call, Explained
from ingot.debug.requested_step import RequestedStep, StepLimits
from ingot.ir.artifact.manifest import TIMINGS
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Refusal, encode_refusals
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.ops.registry import Cost

# The artifacts that the parity tests compile too, in the worker that has them.
reference = pytest.mark.xdist_group("parity-llama-plain")
inductor = pytest.mark.xdist_group("parity-llama-biased")

Artifacts = Callable[..., Path]


@pytest.fixture
def plain(artifact: Artifacts) -> Path:
    return artifact("llama-plain", backend="reference")


@pytest.fixture
def copied(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "copied.ingot"))


def only(found: Explained) -> BucketCosts:
    (bucket,) = found.buckets
    return bucket


def calls(bucket: BucketCosts, op: str) -> list[Call]:
    return [call for call in bucket.calls if call.op == op]


@reference
def test_every_instruction_has_its_cost(plain: Path, checkpoint: Callable[[str], Path]) -> None:
    """By the sizes in config.json, one token of each of two sequences with three pages each."""
    config = json.loads((checkpoint("llama-plain") / "config.json").read_text())
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    bucket = only(explain(plain, RequestedStep(tokens=2, context=40)))
    assert (bucket.step.tokens, bucket.step.sequences, bucket.step.context) == (2, 2, 40)
    main = json.loads((plain / "plan.json").read_text())["positions"]["all"]["plans"]["main"]
    plan = main["buckets"][0]["instructions"]
    assert [(call.op, call.backend) for call in bucket.calls] == [(one["target"], one["backend"]) for one in plan]

    products = calls(bucket, "ingot.linear")
    rows = [(heads + 2 * kv_heads) * width, heads * width, 2 * config["intermediate_size"], config["intermediate_size"]]
    inner = [hidden, heads * width, hidden, config["intermediate_size"]]
    outer = [rows[0], hidden, rows[2], hidden]
    sizes = [*zip(outer, inner, strict=True)] * layers + [(vocab, hidden)]
    assert [call.flops for call in products] == [2 * 2 * n * k for n, k in sizes]
    assert [call.bytes for call in products] == [4 * (2 * k + n * k + 2 * n) for n, k in sizes]
    assert [call.layer for call in products] == [layer for layer in range(layers) for _ in range(4)] + [None]
    for call in calls(bucket, "ingot.paged_attention"):
        assert call.flops == 4 * 2 * heads * width * 48
        assert call.bytes == 4 * (2 * 2 * heads * width + 2 * 48 * 2 * kv_heads * width + 2 * 3 + 3 * 2)
    assert calls(bucket, "ingot.embedding")[0].bytes == 4 * (2 + 2 * 2 * hidden)
    assert all(call.flops == call.bytes == 0 for call in calls(bucket, "aten.view.default"))
    assert bucket.total() == sum((Cost(call.flops, call.bytes) for call in bucket.calls), Cost())


@reference
def test_claims_and_times(plain: Path) -> None:
    bucket = only(explain(plain))
    for call in bucket.calls:
        assert call.claims == {"reference": 1e6, "rowwise": 1e9} and call.backend == "reference"
        assert call.seconds is not None and 0 < call.seconds < 10
    assert bucket.step.timed == (22, 16, 3, 3, 3)
    assert bucket.seconds() == pytest.approx(sum(call.seconds or 0 for call in bucket.calls))


@pytest.mark.slow  # compiles regions
@inductor
def test_regions(artifact: Artifacts) -> None:
    found = explain(artifact("llama-biased", backend="inductor"))
    decode, extend = found.buckets
    assert (decode.bucket, decode.step.tokens, decode.step.sequences, decode.step.timed) == (
        "decode",
        16,
        8,
        (16, 3, 3, 3),
    )
    assert (extend.bucket, extend.step.tokens, extend.step.sequences, extend.step.timed) == ("extend", 512, 4, (22,))
    assert decode.step.context == extend.step.context == 160
    refused = "for few tokens, a call of a region costs more than its computation"
    assert all(call.claims["inductor"] == refused and not call.region for call in decode.calls)
    regions = [call for call in extend.calls if call.op.startswith("region.")]
    assert regions and {call.backend for call in regions} == {"inductor"}
    for region in regions:
        inside = [call for call in extend.calls if call.region == region.name]
        assert region.flops == sum(call.flops for call in inside) > 0
        # What stays inside moves nothing.
        assert 0 < region.bytes < sum(call.bytes for call in inside) and region.seconds is not None
        for call in inside:
            assert call.claims["inductor"] == 1.0 and call.seconds is None and call.backend == "inductor"
            assert {"inductor", "cpu", "reference", "rowwise"} == call.claims.keys()
    outside = [call for call in extend.calls if not call.region]
    assert extend.total().bytes == sum(call.bytes for call in outside)
    # Both classes compute the same: a product has one cost, in a region or not.
    same = explain(artifact("llama-biased", backend="inductor"), RequestedStep(tokens=17))
    assert [one.bucket for one in same.buckets] == ["extend"]


@inductor
def test_a_shared_region_names_the_layer_of_each_call(artifact: Artifacts, tmp_path: Path) -> None:
    """The body keeps the origins of its first call; those of another are as far on as the call itself."""
    copy = Path(shutil.copytree(artifact("llama-biased", backend="inductor"), tmp_path / "shared.ingot"))
    text = (copy / "program.ir").read_text()
    # As a deeper model may have it: what calls r0 calls it once more, five layers on.
    lines = text.splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if line.startswith("%region_r0 ="))
    again = lines[place].replace("%region_r0 =", "%region_r0_1 =").replace("layer 0", "layer 5")
    (copy / "program.ir").write_text("".join([*lines[: place + 1], again, *lines[place + 1 :]]))
    sign(copy, "program.ir")
    (copy / TIMINGS).unlink()  # it times one call less
    sign(copy)
    extend = explain(copy).buckets[1]
    first, second = ([call for call in extend.calls if call.region == name] for name in ("region_r0", "region_r0_1"))
    assert [call.name for call in first] == [call.name for call in second]
    assert {call.layer for call in first} == {0} and {call.layer for call in second} == {5}
    assert all(call.origin.startswith("layer 5, blocks/") for call in second)
    assert all(call.seconds is None for call in extend.calls) and extend.seconds() is None


@reference
def test_near_misses_by_reason(copied: Path) -> None:
    def refusals(runs: Any) -> None:
        (run,) = [one for one in runs if one["name"] == "merge-linears"]
        run["refusals"] = encode_refusals(
            [
                *(Refusal(f"linear_{i}", f"param 'layers.{i}.q.weight' has other uses") for i in range(32)),
                Refusal("linear_99", "%view_7 is no param"),
            ]
        )

    edit_json(copied, "trace/passes.json", refusals)
    (run,) = [one for one in explain(copied).passes if one.name == "merge-linears"]
    first, second = run.misses
    assert (first.count, first.reason, first.node) == (
        32,
        "param 'layers.*.q.weight' has other uses",
        "linear_0",
    )
    assert (second.count, second.reason, second.node) == (1, "%view_7 is no param", "linear_99")
    assert _alike("%view_7 is 2 of layers.12.q and %x") == "%view_* is 2 of layers.*.q and %x"


@reference
def test_choosing_and_sorting(plain: Path) -> None:
    found = explain(plain)
    layer = only(found.of(lambda call: call.layer == 1))
    assert layer.calls and {call.layer for call in layer.calls} == {1}
    ordered = only(found.by(lambda call: call.flops)).calls
    assert [call.flops for call in ordered] == sorted((call.flops for call in ordered), reverse=True)
    assert sorted(call.name for call in ordered) == sorted(call.name for call in only(found).calls)
    json.dumps(found.to_json())


@reference
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 0}, "no bucket class has steps of 0 tokens"),
        ({"tokens": 1025}, "no bucket class has steps of 1025 tokens"),
        ({"context": 0}, "the context is 0"),
        ({"context": 161}, "the context is 161"),
        ({"tokens": 1000, "context": 100}, "8 sequences of 100 positions cannot have 1000 tokens"),
        ({"tokens": 3, "sequences": 4}, "4 sequences of 160 positions cannot have 3 tokens"),
        ({"sequences": 9}, "the sequences are 9"),
    ],
)
def test_steps_that_cannot_be(plain: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        explain(plain, RequestedStep(**options))


@pytest.mark.parametrize(
    ("asked", "sequences", "context"),
    [
        (RequestedStep(512), 1, 1024),
        (RequestedStep(4000, 1), 1, 4000),
        (RequestedStep(8192), 4, 2048),
        (RequestedStep(512, 4), 4, 1024),
    ],
)
def test_a_context_holds_what_is_fed(asked: RequestedStep, sequences: int, context: int) -> None:
    limits = StepLimits(max_seq_len=8192, max_batch=4, page_size=16, max_tokens=8192)
    step = asked.step(BucketClass(name="extend", tokens=(65, 8192)), limits)
    assert (step.tokens, step.sequences, step.context) == (asked.tokens, sequences, context)


@reference
@pytest.mark.parametrize("relpath", ["choices.json", "trace/passes.json"])
def test_files_that_are_malformed(copied: Path, relpath: str) -> None:
    (copied / relpath).write_text("[7]" if relpath == "trace/passes.json" else '{"any": 7}')
    sign(copied, relpath)
    with pytest.raises(ArtifactError, match=f"{relpath} is malformed"):
        explain(copied)


@reference
def test_times_of_something_else(copied: Path) -> None:
    edit_json(copied, TIMINGS, lambda times: times["instructions"]["any"]["seconds"].pop())
    with pytest.raises(ArtifactError, match=f"{TIMINGS} times"):
        explain(copied)
    edit_json(copied, TIMINGS, lambda times: times["instructions"].update(any=3))
    with pytest.raises(ArtifactError, match=f"{TIMINGS} is malformed"):
        explain(copied)


@reference
@in_one_of(3)
def test_neither_compiler_nor_weights(plain: Path) -> None:
    """It reads what stands in the artifact, on any machine."""
    script = """
import sys
import torch
before = set(sys.modules)
from ingot.debug.requested_step import RequestedStep
from ingot.debug.explain import explain
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
explain(sys.argv[1])
assert not {"torch._inductor", "torch._dynamo"} & (set(sys.modules) - before), "a compiler"
assert not [path for path in opened if "/weights/" in path or "/exe/" in path], opened
"""
    done = subprocess.run([sys.executable, "-c", script, str(plain)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

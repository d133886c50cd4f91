"""The peer backend at compile time: when it competes, what it claims, and what a compile writes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from sm_90 import run_without_interpreter
from tiny import TINY

from ingot.backends.nccl.emit import NcclBackend
from ingot.backends.peer.call import PeerCall
from ingot.backends.peer.emit import Peer
from ingot.backends.peer.layout import PUSH_CHUNK_BYTES, PUSH_WARPS, VECTOR_BYTES
from ingot.compile.competing import competing
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass, owed_features
from ingot.ir.backend import No, Yes
from ingot.ir.errors import OptionError, VerifyError
from ingot.ir.interpret import interpret_ranks
from ingot.ir.machine.target import Target
from ingot.ir.ops import all_gather, all_reduce
from ingot.ir.parse import parse_program, parse_type
from ingot.ir.program import Dim, Program, Region, RegionCall, Stage
from ingot.ir.verify import verify
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.plan_file import read_plan_file

pytestmark = pytest.mark.one_in_file(3)

MESH = {"tp": 2}
LAYERS = 3  # of the tiny model


def names(choice: str, mesh: dict[str, int], target: str = "sm_90") -> list[str]:
    return [one.name for one in competing(choice, Target.named(target), mesh)]


def test_it_competes_on_meshes_of_gpus() -> None:
    """By itself only where ranks share layers; if it or NCCL is named, only that one is asked."""
    alone = names("auto", {})
    assert not {"nccl", "peer"} & {*alone}
    assert names("auto", MESH) == [*alone, "nccl", "peer"]
    assert {*names("auto,peer", MESH)} == {*alone, "nccl", "peer"}
    assert names("auto,nccl", MESH) == [*alone, "nccl"]
    assert names("triton", MESH)[-1] == "nccl" and "peer" not in names("triton", MESH)
    assert names("auto", {"pp": 2}) == alone, "stages add nothing"
    assert "peer" not in names("auto", MESH, "cpu")
    for choice, target, mesh in (("auto,peer", "cpu", MESH), ("auto,nccl", "cpu", MESH), ("auto,nccl", "sm_90", {})):
        name = choice.removeprefix("auto,")
        with pytest.raises(OptionError, match=f"unknown backend '{name}'"):
            names(choice, mesh, target)


def site(text: str, bucket: BucketClass, residual: str | None = None) -> tuple[Program, Any, Any]:
    """An all-reduce and the add of a residual after it."""
    body = Program("call", Stage.LOWERED, {"T": Dim("T", 1, 64)}, bucket=bucket)
    x, other = body.add_input("in0", parse_type(text)), body.add_input("in1", parse_type(residual or text))
    total = build.call(body, all_reduce.overload, (x,), {"axis": "tp"})
    return body, total, build.call(body, torch.ops.aten.add.Tensor, (other, total), {})


FEW = BucketClass(name="few", tokens=(1, 64))


def test_a_residual_add_after_a_sum_is_one_call_with_it() -> None:
    body, total, add = site("bf16[T, 64]", FEW)
    target = Target.named("sm_90")
    assert isinstance(Peer().claim([add], target, FEW), Yes)
    assert Peer().cover([total, add]) == [[total, add]]
    assert Peer().cover([total]) == [] == Peer().cover([add]), "the other is computed by another backend"
    build.call(body, torch.ops.aten.mul.Tensor, (total, total), {})
    assert isinstance(found := Peer().claim([add], target, FEW), No), "another call reads the sum"
    assert "not that of a residual" in found.reason and Peer().cover([total, add]) == []


@pytest.mark.parametrize(
    ("text", "residual", "reason"),
    [
        ("bf16[T, 63]", "bf16[T, 63]", "not that of a residual"),  # no whole vectors
        ("bf16[T, 64]", "bf16[64]", "not that of a residual"),  # a bias
        ("f64[T, 64]", "f64[T, 64]", "no kernel for torch.float64"),
    ],
)
def test_adds_that_it_leaves_to_others(text: str, residual: str, reason: str) -> None:
    _, _, add = site(text, FEW, residual)
    found = Peer().claim([add], Target.named("sm_90"), FEW)
    assert isinstance(found, No) and reason in found.reason


def test_a_class_of_larger_sums_alone_is_for_nccl() -> None:
    """A class of 65 tokens or more: 65 rows of 32 MiB are 2080 MiB. The kernel of two ranks takes 2048 MiB."""
    many = BucketClass(name="extend", tokens=(65, 4096))
    for width, claims in ((2**24, False), (2**23, True)):
        _, total, _ = site(f"bf16[T, {width}]", many)
        found = Peer().claim([total], Target.named("sm_90"), many)
        assert isinstance(found, Yes) is claims
        assert claims or f"{65 * 2**25} bytes or more is for NCCL" in found.reason


LAYER = """program p stage=SHARDED
mesh tp=2
dim T in [1, 64]
input x: f32[T, 4]
input r: f32[T, 4]
param w: f32[4, 2] tp=shard(1) = shard(source(name="w"), axis="tp", dim=1, segments=[])
%part = ingot.take_part(%x, axis="tp", dim=1, parts=2) : f32[T, 2] tp=shard(1)
%y = ingot.linear(%part, %w) : f32[T, 4] tp=partial
return y=%y
"""


def test_ranks_compute_a_region_of_both_together() -> None:
    inner, _, add = site("f32[T, 4]", FEW)
    inner.set_outputs({"out0": add})
    verify(inner, under=Stage.FUSED, around={"tp": 2})
    with pytest.raises(VerifyError, match="the mesh has no axis 'tp'"):
        verify(inner, under=Stage.FUSED, around={"dp": 2})
    program = parse_program(LAYER)
    y, residual = program.output_nodes()["y"], list(program.placeholders())[1]
    program.regions["r0"] = Region("r0", inner, "peer")
    program.set_outputs({"out": build.call(program, RegionCall("r0"), (y, residual), {})})
    x, r, weight = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4, 4)
    found = interpret_ranks(
        program, [{"x": x, "r": r, "w": part} for part in (weight[:, :2].clone(), weight[:, 2:].clone())]
    )
    for one in found:
        torch.testing.assert_close(one["out"], x @ weight.T + r)


@pytest.mark.parametrize("invariant", [False, True])
def test_claims(invariant: bool) -> None:
    """All-reduces of floating-point values that are not wider than the sum, before NCCL; all else is refused."""
    bucket = BucketClass(name="few", tokens=(1, 64), features=owed_features(deterministic=invariant))
    target = Target.named("sm_90")

    def claim(op: Any, text: str, target: Target, **attributes: Any) -> Any:
        body = Program("call", Stage.LOWERED, {"T": Dim("T", 1, 64)}, bucket=bucket)
        x = body.add_input("in0", parse_type(text))
        node = build.call(body, op.overload, (x,), {"axis": "tp", **attributes})
        found = Peer().claim([node], target, bucket)
        if isinstance(found, Yes):
            other = NcclBackend().claim([node], target, bucket)
            assert isinstance(other, Yes) and found.cost < other.cost and found.batch_invariant
        return found

    assert all(isinstance(claim(all_reduce, f"{name}[T, 64]", target), Yes) for name in ("bf16", "f16", "f32"))
    refused = {
        "no kernel for torch.float64": claim(all_reduce, "f64[T, 64]", target),
        "ingot.all_gather is no all-reduce": claim(all_gather, "bf16[T, 64]", target, dim=1, parts=2),
        "not for device 'cpu'": claim(all_reduce, "bf16[T, 64]", Target.named("cpu")),
    }
    for reason, found in refused.items():
        assert isinstance(found, No) and reason in found.reason


@pytest.mark.slow
def test_an_artifact_for_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for two GPUs: the kernel has the all-reduces of every bucket class, and NCCL all other collectives."""
    TINY["llama-scaled"].write(
        tmp_path / "model", hidden_size=64, mlp_bias=False, intermediate_size=128, vocab_size=384
    )
    (tmp_path / "script.py").write_text(COMPILE.format(folder=str(tmp_path)))
    assert run_without_interpreter(tmp_path / "script.py") == "done"
    plans = read_plan_file(open_artifact(tmp_path / "a")).of(0)
    peers = {one.id for one in plans.executables.values() if one.backend == "peer"}
    buckets = [bucket for plan in plans.plans.values() for bucket in plan.buckets]
    for bucket in buckets:
        added = [one.target for one in bucket.instructions if one.calls in peers]
        # The embedding's sum has no residual. Each layer has two sums that have one.
        assert added[0] == "ingot.all_reduce" and len(added) == 1 + 2 * LAYERS
        assert all(one.startswith("exe.") for one in added[1:]), "regions"
        others = [one for one in bucket.instructions if one.target in ("ingot.all_reduce", "ingot.all_gather")]
        assert {one.target: one.backend for one in others} == {"ingot.all_reduce": "peer", "ingot.all_gather": "nccl"}


COMPILE = """
import json
from pathlib import Path
from ingot import compile_model

if __name__ == "__main__":
    folder = Path("{folder}")
    compile_model(
        folder / "model", folder / "a", mesh={{"tp": 2}}, target="sm_90", dtype="bfloat16",
        max_batch=2, max_tokens=16, max_seq_len=64, trace="none",
    )
    print(json.dumps("done"))
"""

SCRIPT = """
import json, re, sys, tempfile
from pathlib import Path
import torch, triton
from ingot.backends.peer.emit import Peer
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.machine.target import Target
from ingot.ir.ops import all_reduce
from ingot.ir.parse import parse_type
from ingot.ir.program import Dim, Program

made, compile = [], triton.compile
triton.compile = lambda *args, **options: made.append(compile(*args, **options)) or made[-1]
most = int(sys.argv[2])
body = Program("call", "lowered", {"T": Dim("T", 1, most)}, bucket=BucketClass(name="some", tokens=(1, most)))
x = body.add_input("in0", parse_type(KIND))
total = build.call(body, all_reduce.overload, (x,), {"axis": "tp"})
if sys.argv[1] == "True":
    residual = body.add_input("in1", parse_type(KIND))
    total = build.call(body, torch.ops.aten.add.Tensor, (residual, total), {})
body.set_outputs({"out0": total})
folder = Path(tempfile.mkdtemp())
peer = Peer()
executable = peer.emit(body, "key", Target.named("sm_90"), folder)
ordered = r"(?:atom|ld)\\.global\\.(?:sys|gpu)\\.[.\\w]+"
vectors = r"(?:ld|st)(?:\\.volatile)?\\.global(?:\\.cg)?\\.v4\\.b32"
words = re.compile(f"{ordered}|{vectors}|multimem")
print(json.dumps({
    "files": sorted(one.name for one in folder.iterdir()),
    "listed": list(executable.files),
    "types": [executable.inputs, executable.outputs],
    "call": json.loads((folder / "all_reduce.json").read_text()),
    "ptx": [words.findall(one.asm["ptx"]) for one in made],
    "workspace": peer.workspace(body, executable, folder, {"T": 3}, 1),
}))
"""


KINDS = ("bf16[T, 4096]", "f16[T, 4096]", "f32[T, 2048]")


@pytest.mark.parametrize(
    ("kind", "adds", "pushes"), drawn(2, list(itertools.product(KINDS, [False, True], [False, True])))
)
def test_what_a_compile_writes(kind: str, adds: bool, pushes: bool, tmp_path: Path) -> None:
    """For sm_90: vectors of 16 bytes; no fence for a sum of few bytes, and one for each chunk of many bytes.

    128 rows of 8 KiB are 1 MiB, which is no sum for the kernel of many bytes, and 129 rows are one."""
    most = 129 if pushes else 128
    given = {"KIND": f'"{kind}"', "sys.argv[1]": f'"{adds}"', "sys.argv[2]": f'"{most}"'}
    script = SCRIPT
    for name, value in given.items():
        script = script.replace(name, value)
    (tmp_path / "script.py").write_text(script)
    found = run_without_interpreter(tmp_path / "script.py")
    assert found["files"] == sorted(found["listed"]) and len(found["files"]) == 4 + adds + pushes
    assert found["types"] == [[kind] * (1 + adds), [kind]]
    call = PeerCall.model_validate(found["call"], strict=False)
    counts = [1, 2, 4, 8][not adds :]
    item = 4 if kind.startswith("f32") else 2
    assert (call.axis, call.item, call.adds, list(call.launches)) == ("tp", item, adds, [str(one) for one in counts])
    assert len({one.kernel for one in call.launches.values()}) == 3 + adds
    of_ranks = found["ptx"][: len(counts)]
    for ranks, ptx in zip(counts, of_ranks, strict=True):
        assert not any("release" in one or "acquire" in one for one in ptx), (
            "words show by themselves that they are there"
        )
        # The values to send, of the first tile and of later ones; the same ones to add, and the residual.
        assert ptx.count("ld.global.v4.b32") == (3 if ranks > 1 else 1) + adds
        # The slot of each rank, before and in the loop of the wait. A rank leaves out its own when it runs.
        assert ptx.count("ld.volatile.global.v4.b32") == (2 * ranks if ranks > 1 else 0)
        # The values for each other rank, zeros in each slot, and the result.
        assert ptx.count("st.global.v4.b32") == (2 * ranks if ranks > 1 else 1)
        assert "multimem" not in ptx
    assert (call.push is not None) is pushes and len(found["ptx"]) == len(counts) + pushes
    for ptx in found["ptx"][len(counts) :]:
        assert ptx.count("atom.global.sys.release.exch.b32") == 1, "one fence for a chunk"
        assert ptx.count("ld.global.sys.acquire.b32") == 2
        vectors = PUSH_CHUNK_BYTES // (PUSH_WARPS * 32 * VECTOR_BYTES)  # of a thread and chunk
        # The values to send, the same ones to add, the residual, and the values that were received.
        assert ptx.count("ld.global.v4.b32") == (2 + adds) * vectors
        assert ptx.count("ld.global.cg.v4.b32") == vectors
        assert ptx.count("st.global.v4.b32") == 2 * vectors
        assert "multimem" not in ptx
    assert found["workspace"] == 3 * 3 * 8192

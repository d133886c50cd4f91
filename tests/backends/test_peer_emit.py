"""The peer backend at compile time: when it competes, what it claims, and what a compile writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sm_90 import run_without_interpreter
from tiny import TINY

from ingot.backends.nccl.emit import NcclBackend
from ingot.backends.peer.call import PeerCall
from ingot.backends.peer.emit import Peer
from ingot.compile.competing import competing
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass, owed_features
from ingot.ir.backend import No, Yes
from ingot.ir.errors import OptionError
from ingot.ir.machine.target import Target
from ingot.ir.ops import all_gather, all_reduce
from ingot.ir.parse import parse_type
from ingot.ir.program import Dim, Program
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.plan_file import read_plan_file

MESH = {"tp": 2}


def test_it_competes_only_if_it_is_named() -> None:
    target = Target.named("sm_90")
    unnamed = [one.name for one in competing("auto", target, MESH)]
    assert "nccl" in unnamed and "peer" not in unnamed
    named = [one.name for one in competing("auto,peer", target, MESH)]
    assert {*named} == {*unnamed, "peer"}
    with pytest.raises(OptionError, match="unknown backend 'peer'"):
        competing("auto,peer", Target.named("cpu"))


@pytest.mark.parametrize("invariant", [False, True])
def test_claims(invariant: bool) -> None:
    """All-reduces of floating-point values that are not wider than the sum, before NCCL; all else is refused."""
    bucket = BucketClass(name="few", tokens=(1, 64), features=owed_features(deterministic=invariant))
    target = Target.named("sm_90")

    def claim(op: Any, text: str, target: Target, **attributes: Any) -> Any:
        body = Program("call", "lowered", {"T": Dim("T", 1, 64)}, bucket=bucket)
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
    TINY["llama-scaled"].write(tmp_path / "model", intermediate_size=128, vocab_size=384)
    (tmp_path / "script.py").write_text(COMPILE.format(folder=str(tmp_path)))
    assert run_without_interpreter(tmp_path / "script.py") == "done"
    plans = read_plan_file(open_artifact(tmp_path / "a")).of(0)
    peers = {one.id for one in plans.executables.values() if one.backend == "peer"}
    buckets = [bucket for plan in plans.plans.values() for bucket in plan.buckets]
    assert len(peers) == len(buckets), "one type of values in each range of step sizes"
    for bucket in buckets:
        calls = [one for one in bucket.instructions if one.target in ("ingot.all_reduce", "ingot.all_gather")]
        assert {one.target for one in calls} == {"ingot.all_reduce", "ingot.all_gather"}
        for one in calls:
            is_sum = one.target == "ingot.all_reduce"
            assert (one.backend, one.executable in peers) == (("peer", True) if is_sum else ("nccl", False))


COMPILE = """
import json
from pathlib import Path
from ingot import compile_model

if __name__ == "__main__":
    folder = Path("{folder}")
    compile_model(
        folder / "model", folder / "a", mesh={{"tp": 2}}, target="sm_90", backend="auto,peer", dtype="bfloat16",
        max_batch=2, max_tokens=16, max_seq_len=64, trace="none",
    )
    print(json.dumps("done"))
"""

SCRIPT = """
import json, re, sys, tempfile
from pathlib import Path
import triton
from ingot.backends.peer.emit import Peer
from ingot.ir import build
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.machine.target import Target
from ingot.ir.ops import all_reduce
from ingot.ir.parse import parse_type
from ingot.ir.program import Dim, Program

made, compile = [], triton.compile
triton.compile = lambda *args, **options: made.append(compile(*args, **options)) or made[-1]
body = Program("call", "lowered", {"T": Dim("T", 1, 64)}, bucket=BucketClass(name="few", tokens=(1, 64)))
x = body.add_input("in0", parse_type("bf16[T, 4096]"))
body.set_outputs({"out0": build.call(body, all_reduce.overload, (x,), {"axis": "tp"})})
folder = Path(tempfile.mkdtemp())
peer = Peer()
executable = peer.emit(body, "key", Target.named("sm_90"), folder)
words = re.compile(r"(?:atom|ld)\\.global\\.(?:sys|gpu)\\.[.\\w]+|(?:ld|st)\\.global\\.v4\\.b32|multimem")
print(json.dumps({
    "files": sorted(one.name for one in folder.iterdir()),
    "listed": list(executable.files),
    "types": [executable.inputs, executable.outputs],
    "call": json.loads((folder / "all_reduce.json").read_text()),
    "ptx": [words.findall(one.asm["ptx"]) for one in made],
    "workspace": peer.workspace(body, executable, folder, {"T": 3}, 1),
}))
"""


def test_what_a_compile_writes(tmp_path: Path) -> None:
    """For sm_90: flags are written and read by operations of system scope that order the values around them."""
    (tmp_path / "script.py").write_text(SCRIPT)
    found = run_without_interpreter(tmp_path / "script.py")
    assert found["files"] == sorted(found["listed"]) and len(found["files"]) == 4
    assert found["types"] == [["bf16[T, 4096]"]] * 2
    call = PeerCall.model_validate(found["call"], strict=False)
    assert (call.axis, call.item, list(call.launches)) == ("tp", 2, ["2", "4", "8"])
    assert len({one.kernel for one in call.launches.values()}) == 3
    for ranks, ptx in zip((2, 4, 8), found["ptx"], strict=True):
        assert ptx.count("atom.global.sys.release.exch.b32") == ranks - 1
        assert ptx.count("ld.global.sys.acquire.b32") == 2 * (ranks - 1)
        assert ptx.count("ld.global.v4.b32") == 1 + ranks and ptx.count("st.global.v4.b32") == 2
        assert "multimem" not in ptx
    assert found["workspace"] == 3 * 3 * 4096 * 2

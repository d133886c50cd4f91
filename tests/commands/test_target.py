"""`ingot target`: who would compute each op, and why not others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_world import Command

pytestmark = pytest.mark.xdist_group("cli")


def test_target(ingot: Command) -> None:
    from ingot.ir.ops import OPS

    answer = json.loads(ingot("target", "--target", "cpu", "--json").out)
    assert list(answer) == [
        "target",
        "runs_here",
        "missing_here",
        "tried",
        "no_gpu",
        "features",
        "tools",
        "cache",
        "backends",
        "unavailable",
        "on_request",
        "ops",
    ]
    assert answer["runs_here"] and not answer["unavailable"] and answer["on_request"] == {"onnx": ""}
    ops = {one["op"].removeprefix("ingot."): one for one in answer["ops"]}
    assert ops.keys() == OPS.keys()
    assert ops["linear"]["backends"] == {"1": "cpu", "512": "inductor"} and ops["linear"]["deterministic"] == "cpu"
    assert set(ops["sample"]["backends"].values()) == {"cpu"}
    assert set(ops["select_rows"]["backends"].values()) == {"reference"}
    assert any("is not fusible (T=512)" in reason for reason in ops["sample"]["refusals"])
    text = ingot("target", "--target", "cpu").out
    assert "ingot.paged_attention" in text and "is not fusible" in text


def test_backends_on_request_are_listed_with_what_they_lack(ingot: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.ir.machine import extras

    installed = extras.is_installed
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "tensorrt" and installed(module))
    lacks = "the backend 'tensorrt' needs the package 'tensorrt-cu13', which is not installed"
    text = ingot("target", "--target", "sm_90").out
    assert f"tensorrt competes only if --backend names it, and cannot here: {lacks}\n" in text
    assert "peer competes" not in text and "onnx competes" not in text


def test_explain_has_every_answer(ingot: Command) -> None:
    answer = json.loads(ingot("target", "--target", "cpu", "--explain", "--json").out)
    from ingot.ir.ops import OPS

    classes = {"decode": [1, 16], "extend": [17, 2048]}
    assert [(one["op"], one["bucket"]) for one in answer["choices"]] == [
        (f"ingot.{name}", bucket) for name in OPS for bucket in classes
    ]
    assert all(one["tokens"] == classes[one["bucket"]] for one in answer["choices"])
    for one in answer["choices"]:
        assert [given["backend"] for given in one["answers"]] == ["inductor", "cpu", "reference", "rowwise"]
        assert all(given["reason"] for given in one["answers"]), "a cost or a refusal has a reason"
        claims = {given["backend"]: given["cost"] for given in one["answers"] if given["cost"] is not None}
        if claims:
            assert claims[one["backend"]] == min(claims.values())
        else:  # an op that ranks of a mesh compute together
            assert one["backend"] == "none" and "ranks compute it together" in one["answers"][-1]["reason"]


def test_explain_says_why(ingot: Command) -> None:
    text = ingot("target", "--target", "cpu", "--explain", "--op", "silu_mul").out
    assert "ingot.silu_mul, decode (1–16 tokens): cpu\n  the lowest of 3 costs\n" in text
    assert "no: for few tokens, a call of a region costs more than its computation" in text
    assert "yes, cost 2: regions of inductor are faster" in text and "times" not in text
    text = ingot("target", "--target", "cpu", "--explain", "--op", "ingot.linear", "--backend", "auto,onnx").out
    assert "a compile times cpu, onnx for calls outside regions, and leaves out the slower" in text
    text = ingot("target", "--target", "sm_90", "--explain", "--op", "kv_append").out
    assert "ingot.kv_append, decode-1 (1 token): triton\n  no other backend claims it\n" in text
    text = ingot("target", "--target", "cpu", "--explain", "--op", "linear", "--deterministic").out
    assert "ingot.linear, any (1–2048 tokens): cpu" in text and "no: not batch-invariant" in text


def test_explain_shows_measured_times(ingot: Command, tmp_path: Path) -> None:
    from ingot.ir.artifact.backend_times import BackendTime, BackendTimes
    from ingot.ir.artifact.tuning import TuningLog

    def times(seconds: float) -> tuple[BackendTime, ...]:
        return (BackendTime(tokens=8, sequences=8, microseconds=seconds),)

    call = BackendTimes(
        call=("input in0: f32[T, 8]", "%out = ingot.silu_mul(%in0, %in0) : f32[T, 8]", "return out=%out"),
        bucket="decode tokens=[1, 16] q_max=any",
        backend="reference",
        times={"cpu": times(3.0), "reference": times(2.5)},
        source="measured",
    )
    log = tmp_path / "tuning.json"
    more = call.model_copy(update={"bucket": "extend tokens=[17, 2048] q_max=any"})
    log.write_text(TuningLog(target="cpu", cores=2, choices=(), calls=(call, more)).model_dump_json())
    text = ingot("target", "--target", "cpu", "--explain", "--op", "silu_mul", "--tuning-log", str(log)).out
    decode, extend = text.split("ingot.silu_mul, ")[1:]
    assert decode.startswith("decode (1–16 tokens): reference\n  the fastest in 1 measured call\n")
    assert "3.0 µs of 8 tokens" in decode and "2.5 µs of 8 tokens" in decode
    reason = "cpu took longer than reference, which claims a higher cost than inductor"
    assert extend.startswith(f"extend (17–2048 tokens): inductor\n  {reason}\n") and "2.5 µs of 8 tokens" in extend


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--op", "linear"], "without --explain"),
        (["--explain", "--op", "lineer"], "unknown op 'lineer'"),
        (["--explain", "--backend", "auto,tpu"], "unknown backend 'tpu'"),
    ],
)
def test_explain_refuses(ingot: Command, arguments: list[str], what: str) -> None:
    done = ingot("target", "--target", "cpu", *arguments)
    assert done.code == 2 and what in done.err

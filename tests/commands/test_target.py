"""`ingot target`: who would compute each op, and why not others."""

from __future__ import annotations

import json

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
        "no_gpu",
        "features",
        "tools",
        "cache",
        "backends",
        "unavailable",
        "ops",
    ]
    assert answer["runs_here"] and not answer["unavailable"]
    ops = {one["op"].removeprefix("ingot."): one for one in answer["ops"]}
    assert ops.keys() == OPS.keys()
    assert ops["linear"]["backends"] == {"1": "cpu", "512": "inductor"} and ops["linear"]["deterministic"] == "cpu"
    assert set(ops["sample"]["backends"].values()) == {"cpu"}
    assert set(ops["select_rows"]["backends"].values()) == {"reference"}
    assert any("is not fusible (T=512)" in reason for reason in ops["sample"]["refusals"])
    text = ingot("target", "--target", "cpu").out
    assert "ingot.paged_attention" in text and "is not fusible" in text

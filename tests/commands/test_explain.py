"""`ingot explain` at the command line: tables or JSON, filters, order."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.cli.main import BAD_INPUT, DONE, INGOT, run

pytestmark = pytest.mark.xdist_group("parity-llama-plain")  # the artifact that the parity tests compile too


@pytest.fixture
def ask(artifact: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints, or complains of, by whether it ends well."""

    def ask(*options: str, code: int = DONE) -> str:
        assert run(INGOT, ["explain", str(artifact("llama-plain", backend="reference")), *options]) == code
        said = capsys.readouterr()
        assert "\x1b" not in said.out
        return said.out if code == DONE else said.err

    return ask


def names(text: str) -> list[str]:
    """The calls of the first table."""
    head, _, rest = text.partition("\ncall ")
    assert head.startswith("any: ")
    return [line.split()[0] for line in rest.partition("\n\n")[0].splitlines()[1:]]


def test_tables(ask: Callable[..., str]) -> None:
    text = ask("--step", "T=4,context=100")
    assert text.startswith("any: 4 tokens of 4 sequences, context 100\n")
    assert "linear" in text and "rowwise 1e+09" in text and "layer 0, blocks/attention.py" in text
    assert "\nflops " in text and "\nbytes " in text and "the median of steps of 22, 16, 3, 3, 3 tokens" in text
    misses = text.partition("\npass ")[2].splitlines()
    fused = next(line for line in misses if line.startswith("fuse-qk-norm-rope"))
    assert "no backend has a kernel" in fused and "%kv_append" in fused
    assert next(line for line in misses if line.startswith("make-plan@any")).split()[1:4] == ["1", "–", "nowhere"]


def test_filters_and_order(ask: Callable[..., str]) -> None:
    everything = names(ask())
    products = names(ask("--op", "linear"))
    assert products == names(ask("--op", "ingot.linear")) == [one for one in everything if one.startswith("linear")]
    in_layer = names(ask("--op", "linear", "--layer", "1"))
    assert len(in_layer) == 4 and set(in_layer) < set(products)
    assert names(ask("--backend", "reference")) == everything
    assert names(ask("--sort", "flops")) != everything and sorted(names(ask("--sort", "flops"))) == sorted(everything)
    assert names(ask("--sort", "bytes", "--op", "linear"))[0] in products[-1:] + products[:4]
    assert "because" not in ask("--layer", "1")
    only_pass = ask("--pass", "fuse-qk-norm-rope")
    assert "any: " not in only_pass and "merge-linears" not in only_pass and "no backend has a kernel" in only_pass


def test_json(ask: Callable[..., str]) -> None:
    value = json.loads(ask("--json", "--op", "linear", "--sort", "flops"))
    (bucket,) = value["buckets"]
    flops = [call["flops"] for call in bucket["calls"]]
    assert flops == sorted(flops, reverse=True) and bucket["total"]["flops"] == sum(flops)
    assert {call["op"] for call in bucket["calls"]} == {"ingot.linear"}
    assert bucket["step"]["context"] == 160 and "passes" in value
    value = json.loads(ask("--json", "--pass", "cse"))
    assert "buckets" not in value and [one["name"] for one in value["passes"]] == ["cse", "cse"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pass", "fuse"], "no pass 'fuse' ran"),
        (["--pass", "cse", "--op", "linear"], "--pass together"),
        (["--layer", "77"], "no call matches"),
        (["--backend", "absent"], "no call matches"),
        (["--step", "T=0"], "no bucket class has steps of 0 tokens"),
        (["--step", "T=4,tokens=3"], "'tokens=3' is not part of a step"),
        (["--step", "T=4,T=3"], "'T=3' is not part of a step"),
        (["--step", "T=-4"], "'T=-4' is not part of a step"),
        (["--measure"], "--measure needs a step"),
        (["--measure", "--step", "T=4"], "the artifact is for cpu"),
        (["--trace", "trace.json"], "--trace needs a step"),
        (["--step", "T=4", "--trace", "trace.json"], "the artifact is for cpu"),
        (["--step", "T=4", "--trace", "nowhere/trace.json"], "is in no existing folder"),
        (["--sort", "size"], "sort"),
    ],
)
def test_bad_options(ask: Callable[..., str], options: list[str], message: str) -> None:
    assert message in ask(*options, code=BAD_INPUT)

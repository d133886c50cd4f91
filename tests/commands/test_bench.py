"""`ingot bench` at the command line: what it writes, refuses, and keeps of what it measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_world import Command, Done
from drawn import in_one_of

import ingot.bench.startup as startup
from ingot.bench.children import ChildError
from ingot.bench.drive import Progress
from ingot.bench.engine import BenchEngine
from ingot.bench.startup import Start
from ingot.cli.main import BAD_INPUT, DONE, INTERRUPTED

pytestmark = [
    pytest.mark.xdist_group("parity-llama-plain"),  # the artifact that the parity tests compile too
    pytest.mark.one_in_file(3),
]

STEP = BenchEngine.step
SMALL = ("--input-len", "20", "--output-len", "3")


@pytest.fixture
def bench(artifact: Callable[..., Path], ingot: Command) -> Command:
    """Runs `ingot bench NAME ARTIFACT …` in this process."""
    return lambda name, *options: ingot("bench", name, artifact("llama-plain", backend="reference"), *options)


def value_of(done: Done) -> dict[str, Any]:
    assert done.code == DONE, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def check_origin(value: dict[str, Any]) -> None:
    """What every answer says of where it comes from."""
    assert value["backend"] == "ingot" and value["model_id"] == "llama-plain.ingot"
    assert len(value["artifact"]["build_id"]) == 64 and value["artifact"]["max_batch"] == 8
    assert value["machine"]["cores"] >= 1 and value["machine"]["gpu"] is None
    assert value["versions"].keys() == {"ingot", "python", "torch", "triton", "cuda-bindings", "flashinfer-python"}


def test_latency(bench: Command) -> None:
    done = bench("latency", *SMALL, "--batch-size", 3, "--num-iters-warmup", 1, "--num-iters", 4, "--json", "-")
    value = value_of(done)
    assert value["input_len"] == 20 and value["batch_size"] == 3 and value["num_iters"] == 4
    assert len(value["latencies"]) == 4 and 0 < min(value["latencies"]) <= value["avg_latency"] < 5
    assert value["percentiles"]["10"] <= value["percentiles"]["99"] and not value["interrupted"]
    assert "warm up" in done.err and "measure" in done.err
    check_origin(value)


def test_throughput(bench: Command, tmp_path: Path) -> None:
    done = bench("throughput", *SMALL, "--num-prompts", 11, "--json", tmp_path / "found.json")
    value = json.loads((tmp_path / "found.json").read_text())
    assert value["num_requests"] == 11 and value["total_num_tokens"] == 11 * 23 and value["total_output_tokens"] == 33
    assert value["tokens_per_second"] == pytest.approx(11 * 23 / value["elapsed_time"])
    assert value["requests_per_second"] == pytest.approx(11 / value["elapsed_time"])
    # Eight requests in three steps and then three in three; those that warm up are not counted.
    assert value["steps"]["steps"] <= 7 and 4 <= value["steps"]["decode_steps"] <= 5
    assert done.out.startswith("random, at once\nrequests ")
    assert "33" not in done.out.splitlines()[0] and "tokens/s, in and out" in done.out
    check_origin(value)


def test_serve_sim(bench: Command, tmp_path: Path) -> None:
    options = (
        "--num-prompts",
        9,
        "--request-rate",
        200,
        "--burstiness",
        0.5,
        "--max-concurrency",
        3,
        "--save-detailed",
    )
    more = ("--goodput", "ttft:60000", "e2el:60000", "--metric-percentiles", "50,99", "--seed", 3)
    value = value_of(bench("serve-sim", *options, *more, "--json", "-"))
    assert value["completed"] == 9 and value["failed"] == 0 and value["max_concurrent_requests"] <= 3
    assert value["request_goodput"] == value["request_throughput"] == pytest.approx(9 / value["duration"])
    assert value["total_input_tokens"] == sum(value["input_lens"]) and len(set(value["input_lens"])) > 2
    assert value["total_output_tokens"] == sum(value["output_lens"])
    assert [1 + len(gaps) for gaps in value["itls"]] == value["output_lens"] and value["errors"] == [""] * 9
    assert value["duration"] >= 9 / 200 and value["start_times"] == sorted(value["start_times"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < value[f"p50_{metric}_ms"] == value[f"median_{metric}_ms"] <= value[f"p99_{metric}_ms"]
    assert value["dataset"] == "sharegpt" and value["steps"]["decode_idle_share"] is None
    check_origin(value)
    at_once = value_of(bench("serve-sim", "--dataset", "random", *SMALL, "--num-prompts", 2, "--json", "-"))
    prefixed = value_of(bench("serve-sim", "--num-prompts", 3, "--prefix-len", 50, "--save-detailed", "--json", "-"))
    assert prefixed["completed"] == 3 and prefixed["prefix_len"] == 50
    assert min(prefixed["input_lens"]) > 50
    assert at_once["request_rate"] == "inf" and at_once["request_goodput"] is None and at_once["input_len"] == 20
    assert "itls" not in at_once


@in_one_of(3)
def test_startup(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own once; the medians from starts of our own."""
    value = value_of(bench("startup", "--num-iters", 1, "--input-len", 9, "--json", "-"))
    phases, (first,), (ready,) = value["phases"], value["first_token_times"], value["ready_times"]
    assert 0 < ready < first < 60 and first == pytest.approx(sum(phases.values()))
    assert list(phases) == ["start", "import", "load", "prompt"] and value["warm_startup_times"] == [phases["load"]]
    assert 0 < value["loading"]["engine"] < phases["load"]
    check_origin(value)
    totals = iter([7.0, 5.0, 9.0])

    def start(folder: Path, *, tokens: int, timeout: float) -> Start:
        total = next(totals)
        return Start(total, {"start": 1.0, "import": 1.0, "load": total - 2.5, "prompt": 0.5}, {"engine": total / 4})

    monkeypatch.setattr(startup, "start", start)
    value = value_of(bench("startup", "--num-iters", 3, "--json", "-"))
    assert value["median_first_token_time"] == 7.0 and value["median_ready_time"] == 6.5
    assert value["warm_startup_times"] == [4.5, 2.5, 6.5] and value["avg_warm_startup_time"] == 4.5
    assert value["loading"] == {"engine": 1.75}


def test_a_start_that_fails_says_why(bench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> Start:
        raise ChildError("it was ended after 1 s")

    monkeypatch.setattr(startup, "start", start)
    done = bench("startup")
    assert done.code == BAD_INPUT and "does not start on this machine: it was ended after 1 s" in done.err


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C in the step of that number."""

    def at(number: int) -> None:
        steps = iter(range(number))

        def interrupting(self: BenchEngine) -> Iterator[Progress]:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return iter(STEP(self))

        monkeypatch.setattr(BenchEngine, "step", interrupting)

    return at


def test_ctrl_c_keeps_what_was_measured(bench: Command, interrupted: Callable[[int], None]) -> None:
    # A batch takes a step for each of its three tokens, and one call more for the step in flight.
    interrupted(10)
    done = bench("latency", *SMALL, "--num-iters-warmup", 0, "--json", "-")
    value = json.loads(done.out)
    assert done.code == INTERRUPTED and value["interrupted"] and value["num_iters"] == len(value["latencies"]) == 2
    assert done.err.endswith("error: interrupted\n")
    interrupted(0)
    assert bench("latency", *SMALL, "--json", "-") == Done(
        INTERRUPTED, "", "ingot: load\ningot: warm up\nerror: interrupted\n"
    )
    for name in ("throughput", "serve-sim"):
        few = ("--dataset", "random", *SMALL, "--num-prompts", 30)
        interrupted(14)  # four of them warm up
        done = bench(name, *few, "--json", "-")
        value = json.loads(done.out)
        assert done.code == INTERRUPTED and value["interrupted"]
        assert 0 < value["completed" if name == "serve-sim" else "num_requests"] < 30
        interrupted(5)
        done = bench(name, *few, "--json", "-")
        assert done.code == INTERRUPTED and done.out == "" and "measure" not in done.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["latency", "--input-len", "0"], "--input-len is 0\n  expected: 1 or more"),
        (["latency", "--num-iters-warmup", "-1"], "--num-iters-warmup is -1\n  expected: 0 or more"),
        (["latency", "--batch-size", "9"], "at most 8, the sequences at once"),
        (["latency", "--input-len", "300", "--output-len", "300"], "--input-len 300 and --output-len 300: too much"),
        (["throughput", "--num-prompts", "0"], "--num-prompts is 0"),
        (["throughput", "--output-len", "5000"], "the tokens of a sequence that it was compiled for"),
        (["throughput", "--prefix-len", "-1"], "--prefix-len is -1"),
        (
            ["throughput", "--dataset", "sharegpt", "--prefix-len", "5000"],
            "--dataset sharegpt with --prefix-len 5000: too much",
        ),
        (["throughput", *SMALL, "--prefix-len", "5000"], "--output-len 3 and --prefix-len 5000: too much"),
        (["throughput", "--dataset", "sonnet"], "sharegpt"),
        (["startup", "--timeout", "0"], "--timeout is 0\n  expected: a number above 0"),
        (["startup", "--input-len", "5000"], "the tokens of a sequence but one"),
        (["serve-sim", "--request-rate", "nan"], "--request-rate is nan\n  expected: a number above 0"),
        (["serve-sim", "--request-rate", "-1"], "--request-rate is -1"),
        (["serve-sim", "--burstiness", "0"], "--burstiness is 0"),
        (["serve-sim", "--max-concurrency", "0"], "--max-concurrency is 0"),
        (["serve-sim", "--goodput", "itl:5"], "ttft:MILLISECONDS, tpot:MILLISECONDS, e2el:MILLISECONDS"),
        (["serve-sim", "--goodput", "ttft:5", "ttft:6"], "each at most once"),
        (["serve-sim", "--goodput", "ttft"], "--goodput is 'ttft'"),
        (["serve-sim", "--metric-percentiles", "50,101"], "numbers from 0 to 100"),
        (["serve-sim", "--metric-percentiles", "nan"], "numbers from 0 to 100"),
        (["serve-sim", "--json", "/nowhere/found.json"], "--json\n  expected: a file in a folder that exists, or -"),
        (["serve-sim", "--json", "--seed"], "--json\n  expected: a file"),
        (["serve-sim", "--tokens", "5"], "Usage: ingot bench serve-sim"),
    ],
)
def test_bad_options_are_refused(bench: Command, arguments: list[str], complaint: str) -> None:
    done = bench(*arguments)
    assert done.code == BAD_INPUT and done.out == "" and complaint in done.err and "Traceback" not in done.err

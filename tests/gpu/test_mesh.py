"""Meshes of two GPUs: tokens of one GPU, faults that end all ranks within seconds, and what is captured."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from gpu_model import MODEL
from run_seed import again, run_seed
from thread_ranks import is_gone
from tiny import TINY
from tokenizers import decoders, pre_tokenizers

from ingot import LLM, SamplingParams, compile_model
from ingot.debug.explain import explain
from ingot.debug.requested_step import RequestedStep
from ingot.ir.errors import RankError
from ingot.ir.mesh import parse_mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
    pytest.mark.xdist_group("two gpus"),
    # A test compiles two artifacts at most. On two H200s a compile took up to 110 s.
    pytest.mark.timeout(1200),
]
SECONDS = 5.0  # in which all ranks end after a fault
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "llama-scaled",
        {"num_hidden_layers": 3, "hidden_size": 64, "mlp_bias": False, "intermediate_size": 128, "vocab_size": 384},
        {},
    ),
    "gemma3": ("gemma3_text-old", {"intermediate_size": 128, "vocab_size": 384}, {}),
    "qwen3_moe": ("qwen3_moe-plain", {"moe_intermediate_size": 64, "vocab_size": 384}, {}),
    "qwen3-int8": ("qwen3-scaled", {"num_hidden_layers": 3, "intermediate_size": 128}, {"quantize": "int8"}),
}
EDITED: dict[str, dict[str, Any]] = {
    # All sums by NCCL. Without it, a kernel adds over peer memory.
    "nccl": {"backend": "auto,nccl"},
    # The prompt of 90 tokens is a long step.
    "rows": {"passes": "default,sequence-parallel"},
}
LIMITS: dict[str, Any] = {"max_batch": 8, "max_tokens": 96, "max_seq_len": 160, "dtype": "float32", "trace": "none"}
LONG = [(11 * place + 5) % 300 for place in range(90)]
PROMPTS = [LONG, [*LONG[:40], 7], [9], [5, 6, 7, 8], list(range(20, 41)), [301, 2]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, top_k=20, max_tokens=12, logit_bias={3: 4.0}, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, top_p=0.8, max_tokens=11, allowed_token_ids=list(range(50, 90))),
    SamplingParams(temperature=0.8, seed=6, min_p=0.05, max_tokens=13, min_tokens=13),
]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`artifact(model, mesh)`: the path of an artifact; the mesh "" is one GPU. With "tp=2 nccl", NCCL adds all. With
    "tp=2 rows", ranks split the rows of long steps."""
    folder = tmp_path_factory.mktemp("mesh")

    def made(model: str, mesh: str) -> Path:
        name, changes, options = MODELS[model]
        path = folder / f"{model}-{mesh or 'one'}.ingot"
        if not path.exists():
            if not (folder / model).exists():
                TINY[name].write(folder / model, **changes)
            for word, more in EDITED.items():
                if mesh.endswith(f" {word}"):
                    options, mesh = {**options, **more}, mesh.removesuffix(f" {word}")
            compile_model(folder / model, path, mesh=parse_mesh(mesh), target="cuda", **LIMITS, **options)
        return path

    return made


def generated(llm: LLM) -> list[list[int]]:
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS)]


def closed(llm: LLM) -> None:
    leader = llm.loaded.leader
    assert leader is not None
    leader.close()


@pytest.mark.parametrize("cuda_graphs", ["need", "all", "none"])
@pytest.mark.parametrize(("model", "mesh"), list(itertools.product(MODELS, ("tp=2", "tp=2 nccl", "tp=2 rows", "pp=2"))))
def test_tokens_are_those_of_one_gpu(
    model: str, mesh: str, cuda_graphs: Any, artifact: Callable[[str, str], Path]
) -> None:
    if cuda_graphs != "need" and model != "llama":
        pytest.skip("one model suffices for when graphs are captured")
    wanted = generated(LLM(artifact(model, ""), num_kv_pages=60))
    llm = LLM(artifact(model, mesh), num_kv_pages=60, cuda_graphs=cuda_graphs)
    try:
        assert generated(llm) == wanted
        assert generated(llm) == wanted, "from cached pages, and by captured graphs"
        assert bool(llm.loaded.executor.captured.decode) is (cuda_graphs != "none")
        shares: Any = getattr(llm.loaded.context.communicators.get("tp"), "shares", [])
        kernels = mesh in ("tp=2", "tp=2 rows")
        assert [one is not None for one in shares] == [True] * kernels, "NCCL does not replace the kernel"
    finally:
        closed(llm)


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_grammars_wait_for_masks_on_both_ranks(mesh: str, tmp_path: Path) -> None:
    """Steps with grammars and without them, in turns: both ranks replay graphs of two parts for the first."""
    checkpoint = MODEL.write(tmp_path / "checkpoint")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 256}')
    compile_model(checkpoint, tmp_path / "a.ingot", mesh=parse_mesh(mesh), target="cuda", **LIMITS)
    llm = LLM(tmp_path / "a.ingot", num_kv_pages=60)
    free = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    try:
        alone = [one.outputs[0].token_ids for one in llm.generate(["a", "cd"], free)]
        params = [
            SamplingParams(temperature=1.0, seed=seed, max_tokens=40, structured_outputs={"regex": "[0-9]{3,6}x"})
            for seed in range(3)
        ]
        found = [
            one.outputs[0] for one in llm.generate(["a", "b", "cd", "e", "f"], [free, params[0], free, *params[1:]])
        ]
        assert [one.token_ids for one in found[::2][:2]] == alone
        for one in (found[1], *found[3:]):
            assert one.finish_reason == "stop" and re.fullmatch("[0-9]{3,6}x", one.text), one
        assert [one.outputs[0].token_ids for one in llm.generate(["a", "cd"], free)] == alone
    finally:
        closed(llm)


def strike(fault: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = llm.loaded.leader
    assert leader is not None
    if fault == "raise":
        write = leader._steps._slots.write

        def spoiled(slot: Any, inputs: Any) -> None:
            write(slot, inputs)
            slot[0] = 10**6  # a step with more tokens than its buffer

        monkeypatch.setattr(leader._steps._slots, "write", spoiled)
    else:
        os.kill(leader.process_ids[1], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)


@pytest.mark.parametrize("number", range(int(os.environ.get("INGOT_GPU_RANK_FAULTS", "20"))))
def test_a_fault_ends_all_ranks(
    number: int, artifact: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a random step: rank 1 is killed, stopped, or fails. Rank 0 waits for it on the GPU by then."""
    draw = random.Random(f"{run_seed()} {number}")
    mesh, fault = ("tp=2", "pp=2", "tp=2 nccl")[number // 3 % 3], ("kill", "stop", "raise")[number % 3]
    at = draw.randint(1, 40)
    llm = LLM(artifact("llama", mesh), num_kv_pages=60, cuda_graphs=draw.choice(("need", "none")))
    leader = llm.loaded.leader
    assert leader is not None
    try:
        engine: Any = llm.llm_engine
        engine.add_request("long", {"prompt_token_ids": [4, 5]}, SamplingParams(max_tokens=150, ignore_eos=True))
        for _ in range(at):
            engine.step()
        pids = leader.process_ids
        begin = time.monotonic()
        strike(fault, llm, monkeypatch)
        with pytest.raises(RankError) as caught:
            while True:
                engine.step()
        assert time.monotonic() - begin < SECONDS, again((mesh, fault, at))
        assert caught.value.what.startswith("rank 1 "), caught.value.what
        while time.monotonic() - begin < SECONDS and not all(map(is_gone, pids.values())):
            time.sleep(0.02)
        assert all(map(is_gone, pids.values())), again((mesh, fault, at))
    finally:
        leader.close()


@pytest.mark.parametrize("mesh", ["tp=2", "tp=2 nccl"])
def test_ranks_end_with_rank_0(mesh: str, artifact: Callable[[str, str], Path]) -> None:
    """Rank 0 is killed while it generates: the kernels of rank 1 wait for it, and nothing tells them."""
    script = (
        "import sys\nfrom ingot import LLM, SamplingParams\nllm = LLM(sys.argv[1], num_kv_pages=60)\n"
        "print(*llm.loaded.leader.process_ids.values(), flush=True)\n"
        "while True:\n    llm.generate({'prompt_token_ids': [4]}, SamplingParams(max_tokens=100, ignore_eos=True))\n"
    )
    command = [sys.executable, "-c", script, str(artifact("llama", mesh))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        pids = [int(one) for one in child.stdout.readline().split()]
        time.sleep(1.0)
        begin = time.monotonic()
        child.kill()
        while time.monotonic() - begin < SECONDS and not all(map(is_gone, pids)):
            time.sleep(0.02)
        assert len(pids) == 1 and all(map(is_gone, pids))


def test_sums_over_peer_memory_have_the_bits_of_nccl() -> None:
    """By the benchmark, which compares sums of random values of each size, and chains of sums in a graph."""
    script = Path(__file__).parents[2] / "benchmarks" / "kernels" / "collectives.py"
    command = [sys.executable, str(script), "--sizes", "16,8192,8208,1048576,1048592,16777216,33554448"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert made.returncode == 0, made.stderr
    assert "all_reduce_1048576.peer" in made.stdout and "all_reduce_1048592.peer" not in made.stdout
    assert "all_reduce_33554448.push_add" in made.stdout


@pytest.fixture
def full_gpu() -> Iterator[None]:
    """All but 600 MB of GPU 1 is taken by this process."""
    free, _ = torch.cuda.mem_get_info(1)
    taken = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda:1")
    yield
    del taken
    torch.cuda.empty_cache()


def test_a_gpu_without_memory_is_said(artifact: Callable[[str, str], Path], full_gpu: None) -> None:
    from ingot.ir.errors import IngotError

    path = artifact("llama", "tp=2")
    begin = time.monotonic()
    with pytest.raises(IngotError):
        LLM(path)
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("mesh", ["tp=2", "tp=2 nccl", "pp=2"])
def test_a_step_is_measured_on_both_ranks(mesh: str, artifact: Callable[[str, str], Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    (bucket,) = explain(
        artifact("llama", mesh), RequestedStep.parse("T=4,context=40"), measure=True, trace=trace
    ).buckets
    time = bucket.mesh
    assert time is not None and bucket.time is not None and 1e-5 < time.measured < 0.1 and time.steps == 12
    for one in time.ranks:
        assert one.computes > 0 and one.moves > 0 and one.waits >= 0
        assert one.computes + one.moves + one.waits + one.between == pytest.approx(one.seconds)
    runs = [call for call in bucket.calls if not call.region]
    assert {one.rank for call in runs for one in call.ranks} == {0, 1}
    assert all(0 < one.seconds < 0.01 for call in runs for one in call.ranks)
    assert time.exchanges and {one.axis for one in time.exchanges} == {mesh[:2]}
    assert all((one.floor is None) == (time.link is None) for one in time.exchanges)
    assert all(one.floor is None or one.moves > one.floor for one in time.exchanges)
    names = {
        one["args"]["name"] for one in json.loads(trace.read_text())["traceEvents"] if one["name"] == "process_name"
    }
    assert {name.partition(" (")[0] for name in names} == {"rank 0", "rank 1"}
    assert sum("GPU" in name for name in names) == 2

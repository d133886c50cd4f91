"""The memory that a plan states: what a step allocates at its peak, and what the loader makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from largest_step import allocated, allocated_by_step, largest_step, pages_of
from safetensors import safe_open

from ingot import LLM, compile_model
from ingot.backends.cpu.emit import Cpu
from ingot.backends.reference.emit import Rowwise
from ingot.ir.artifact.plan import PlanFile
from ingot.ir.cache.form import CacheForm
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.errors import OptionError
from ingot.ir.logprob_limits import MAX_SCORED
from ingot.ir.masks import Mask
from ingot.ir.ops import OPS, paged_attention
from ingot.passes.dry_run import peak_bytes
from ingot.runtime.loading.loader import load_artifact

PICO = Path(__file__).parents[2] / "models" / "pico"
# How far below its plan a step may stay, of what the project promises.
LEAST_USED = 0.85


@pytest.fixture(scope="module")
def pico(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pico") / "pico.ingot"
    compile_model(PICO, folder, backend="reference", max_batch=16, max_tokens=512, max_seq_len=1024)
    return folder


def test_the_largest_step_takes_what_the_plan_says(pico: Path) -> None:
    loaded = load_artifact(pico, num_pages=200)
    inputs = largest_step(loaded)
    assert pages_of(loaded.limits) <= 200
    loaded.executor.launch(largest_step(loaded, 64))  # what is allocated once and for all
    planned = loaded.plan.buckets[0].memory
    assert {name: planned.sizes[name] for name in "TBLP"} == {"T": 512, "B": 16, "L": 16 + MAX_SCORED, "P": 64}
    found = allocated_by_step(loaded, inputs)
    assert LEAST_USED * planned.activations <= found <= planned.activations


def test_resident_memory_is_what_lies_in_the_files_and_states(pico: Path) -> None:
    loaded = load_artifact(pico, num_pages=3)
    memory = loaded.plan.memory
    weights = 0
    for file in (pico / "weights").glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            weights += sum(opened.get_tensor(name).nbytes for name in list(opened.keys()))
    assert memory.weights == weights
    states = sum(state.nbytes for state in loaded.executor.states.values())
    assert states == memory.states + 3 * memory.page
    assert memory.groups["full"].pages_per_sequence == 1024 // 16


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", sorted(name for name, op in OPS.items() if op.across is None))
def test_a_dry_run_allocates_what_the_op_does(name: str) -> None:
    """Call by call on the samples; what looks at data is planned for its worst, so never less than was allocated."""
    op = OPS[name]
    for dtype in (torch.float32, torch.bfloat16):
        for sample in op.samples(torch.Generator().manual_seed(0), dtype):
            if name in ("linear", "head_linear", "experts", "quant_linear") and dtype == torch.bfloat16:
                continue  # oneDNN takes scratch of a few hundred kB a thread, whatever the sizes
            found = allocated(lambda: (op.in_place or op.reference)(*sample.args, **sample.kwargs))  # noqa: B023
            meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in sample.args]
            planned = peak_bytes(op.costliest, meta, sample.kwargs)
            assert found <= planned
            if op.costliest in (op.reference, op.in_place):
                assert planned - found <= 64  # the numbers among its arguments


@pytest.mark.parametrize("mask", ["causal", "window_100", "chunked_100", "bidirectional"])
@pytest.mark.parametrize("start", [0, 7, 512])
def test_attention_of_the_cpu_backend(mask: str, start: int) -> None:
    """At the end of the pages it comes close to its plan, and nowhere beyond it."""
    from ingot.backends.cpu.calls.attention import _by_sequence

    tokens, pages, heads, kv_heads, dim = 1024, 96, 4, 2, 64
    q = torch.randn(tokens, heads, dim, dtype=torch.bfloat16)
    kv = torch.randn(pages, 2, 16, kv_heads, dim, dtype=torch.bfloat16)
    ints = [torch.tensor(value, dtype=torch.int32) for value in ([list(range(pages))], [0], [tokens], [start + tokens])]
    args = (q, kv, *ints)
    kwargs: dict[str, Any] = {"scale": 0.125, "mask": mask}
    form = CacheForm.of_cache(kv.shape, dim, None)
    found = allocated(lambda: _by_sequence(q, kv, form, *ints, 0.125, Mask.named(mask)))
    meta = [arg.to("meta") for arg in args]
    node = torch.fx.Graph().call_function(paged_attention.overload)
    planned = peak_bytes(Cpu().dry_run(node), meta, kwargs)
    assert found <= planned
    if start == 512 and mask != "chunked_100":  # the first token fed may be the last of its chunk, and here it is not
        assert found >= LEAST_USED * planned


def test_row_by_row_takes_a_row_and_the_results() -> None:
    op = OPS["rms_norm"]
    x, weight = torch.randn(200, 512), torch.randn(512)
    found = allocated(lambda: op.rowwise(x, weight, eps=1e-5))
    node = torch.fx.Graph().call_function(op.overload)
    planned = peak_bytes(Rowwise().dry_run(node), [x.to("meta"), weight.to("meta")], {"eps": 1e-5})
    assert LEAST_USED * planned <= found <= planned


def test_the_pool_gets_what_memory_remains(pico: Path) -> None:
    plans = PlanFile.model_validate_json((pico / "plan.json").read_text()).of(0)
    need = MemoryNeed.of(plans)
    least = need.fixed + need.sequence
    assert load_artifact(pico, memory=least).num_pages == 64
    assert load_artifact(pico, memory=least + 5 * need.page + 1).num_pages == 69
    assert load_artifact(pico).num_pages == 16 * 64, "all sequences at full length fit"
    with pytest.raises(OptionError, match=rf"the weights take {need.weights}, the activations {need.activations}"):
        load_artifact(pico, memory=least - 1)
    assert load_artifact(pico, memory=need.fixed + 7 * need.page, num_pages=7).num_pages == 7
    with pytest.raises(OptionError, match=r"at most 7 pages"):
        load_artifact(pico, memory=need.fixed + 7 * need.page, num_pages=8)
    with pytest.raises(OptionError, match="the bytes of memory are -1"):
        LLM(pico, memory=-1)


def test_views_are_counted_once(pico: Path) -> None:
    """q, k and v are slices of one product: its memory goes with the last of them."""
    plan = json.loads((pico / "plan.json").read_text())
    values = plan["positions"]["all"]["plans"]["main"]["buckets"][0]["values"]
    views = {name: value for name, value in values.items() if value["buffer"] == "view"}
    assert views and all(value["of"] in values and values[value["of"]]["buffer"] == "pool" for value in views.values())


@pytest.mark.slow
def test_the_largest_step_of_compiled_regions(artifact: Callable[..., Path], tmp_path: Path) -> None:
    """pico through the compiler: regions and kernels allocate what was measured when they were built."""
    folder = tmp_path / "pico.ingot"
    compile_model(PICO, folder, backend="inductor", max_batch=16, max_tokens=512, max_seq_len=1024, jobs=1)
    loaded = load_artifact(folder, num_pages=200)
    loaded.executor.launch(largest_step(loaded, 64))
    planned = max(bucket.memory.activations for bucket in loaded.plan.buckets)
    assert LEAST_USED * planned <= allocated_by_step(loaded, largest_step(loaded)) <= planned

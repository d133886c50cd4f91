"""Faults in kernels, in the executor and in memory, planted by wrapping what is loaded: the instruction is named."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_table import patch_entry
from safetensors.torch import load_file, save_file
from tiny import CHECKPOINTS, TINY

from ingot import compile_model
from ingot.backends.table import BACKENDS
from ingot.debug.bisect.execution import one_call
from ingot.debug.bisect.execution.rerun import rerun
from ingot.debug.bisect.verdict import Kind
from ingot.ir.program import Program
from ingot.reproduce import reproduce
from ingot.runtime.loading.loader import load_artifact

pytestmark = [pytest.mark.xdist_group("blame-execution"), pytest.mark.one_in_file(3)]

Kernel = Callable[..., Any]
Compiled = Callable[..., Path]
Blame = Callable[..., Any]
SMALL = "mistral-cut"  # one layer, of the ops that most models have


def plant(patch: pytest.MonkeyPatch, op: str, wrap: Callable[[Kernel], Kernel]) -> None:
    """Let every library that is loaded from now on compute `op` by `wrap` of its kernel."""
    load = BACKENDS["cpu"].library
    assert load is not None

    def faulty(executable: Any, folder: Path, context: Any) -> dict[str, Kernel]:
        library = load(executable, folder, context)
        return {**library, f"ingot.{op}": wrap(library[f"ingot.{op}"])}

    patch_entry(patch, "cpu", library=faulty)


def argument(place: int, change: Callable[[Any], Any]) -> Callable[[Kernel], Kernel]:
    """A kernel that takes its argument `place` for another."""
    return lambda kernel: (
        lambda *args, **kwargs: kernel(*args[:place], change(args[place]), *args[place + 1 :], **kwargs)
    )


def option(name: str, change: Callable[[Any], Any]) -> Callable[[Kernel], Kernel]:
    return lambda kernel: lambda *args, **kwargs: kernel(*args, **{**kwargs, name: change(kwargs[name])})


def result(change: Callable[[Any], Any]) -> Callable[[Kernel], Kernel]:
    return lambda kernel: lambda *args, **kwargs: change(kernel(*args, **kwargs))


def swapped(first: int, second: int) -> Callable[[Kernel], Kernel]:
    def wrap(kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            given[first], given[second] = args[second], args[first]
            return kernel(*given, **kwargs)

        return run

    return wrap


def one_more(op: Kernel) -> Kernel:
    """The first row of the result is that of the last."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = op(*args, **kwargs)
        found[0] = found[-1]
        return found

    return run


def unwritten(op: Kernel) -> Kernel:
    """The last row stays what the memory happened to hold."""

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = torch.empty_like(x)
        found[:-1] = op(x, *args, **kwargs)[:-1]
        return found

    return run


def stale(number: int) -> Callable[[Kernel], Kernel]:
    """The state `number` among the arguments is left as it was."""

    def wrap(kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            before = args[number].clone()
            found = kernel(*args, **kwargs)
            args[number].copy_(before)
            return found

        return run

    return wrap


def writing(place: int) -> Callable[[Kernel], Kernel]:
    """It leaves something in an argument that it only reads."""

    def wrap(kernel: Kernel) -> Kernel:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = kernel(*args, **kwargs)
            args[place].view(-1)[-1:] = 3
            return found

        return run

    return wrap


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Parameters for pytest: all but the `chosen` ones marked slow."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.slow) for name in names]


def transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().view(weight.shape)


# op, the fault, and words of what is found.
FAULTS: dict[str, tuple[str, Callable[[Kernel], Kernel], str]] = {
    "another epsilon": ("rms_norm", option("eps", lambda eps: eps * 1.5), "is"),
    "no epsilon in the fused norm": ("add_rms_norm", option("eps", lambda eps: 0.0), "is"),
    "no residual": ("add_rms_norm", argument(1, torch.zeros_like), "is"),
    "gate and up swapped": ("silu_mul", swapped(0, 1), "is"),
    "a transposed weight": ("linear", argument(1, transposed), "is"),
    "a mask edge": ("paged_attention", argument(5, lambda lengths: lengths - 1), "is"),
    "another page": ("paged_attention", argument(2, lambda table: table.roll(1, 0)), "is"),
    "a scale": ("paged_attention", option("scale", lambda scale: scale * 1.05), "is"),
    "a slot further": ("qk_norm_rope_append", argument(6, lambda slots: slots ^ 1), "the state 'kv.0' is"),
    "a position further": ("qk_norm_rope_append", argument(4, lambda places: places + 1), "is"),
    "k and v swapped": ("qk_norm_rope_append", swapped(2, 3), "the state 'kv.0' is"),
    "a stale cache": ("qk_norm_rope_append", stale(0), "elements were not written"),
    "a stale token": ("advance", stale(0), "the state 'last_token' is"),
    "a stale position": ("advance", stale(1), "the state 'position' is"),
    "a row of another token": ("rms_norm", one_more, "is"),
    "another token": ("sample", result(lambda tokens: (tokens + 1).int()), "'tokens' is"),
    "a position fed late": ("feed", result(lambda found: (found[0], found[1] - 1, *found[2:])), "'item_1' is"),
    "in place on an input": ("linear", writing(0), "which it only reads"),
    "a write into a weight": ("add_rms_norm", writing(2), "writes into 'layers.0.mlp_norm.weight'"),
    "a write into the cache": ("paged_attention", writing(1), "writes into 'kv.0', which it only reads"),
    "half precision": ("linear", result(lambda found: found.half().to(found.dtype)), "is"),
    "infinities": ("linear", result(lambda found: found / 0), "are not finite"),
    "a row that is not written": ("rms_norm", unwritten, "are not finite"),
    "no tensor": ("silu_mul", result(lambda found: [3.0]), "cannot be judged"),
    "another shape": ("silu_mul", result(lambda found: found[:, 1:]), "has"),
    "no result": ("linear", result(lambda found: 1 // 0), "raises ZeroDivisionError"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    quick(
        FAULTS, "another epsilon", "a mask edge", "a stale cache", "in place on an input", "no tensor", "another shape"
    ),
)
def test_a_faulty_kernel_is_named(name: str, kernels: Compiled, blame: Blame, monkeypatch: pytest.MonkeyPatch) -> None:
    op, fault, words = FAULTS[name]
    compiled = kernels(SMALL)  # before the fault is there
    plant(monkeypatch, op, fault)
    verdict = blame(compiled, SMALL)
    assert verdict is not None
    assert (verdict.kind, verdict.blamed, verdict.op) == (Kind.BACKEND, "cpu", f"ingot.{op}"), verdict
    assert words in verdict.found and verdict.runs > 0, verdict


def test_an_instruction_whose_reference_fails_is_named(
    kernels: Compiled, blame: Blame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes what the reference does not."""

    def fails(alone: Program, *args: Any, **kwargs: Any) -> Any:
        if any("silu_mul" in node.name for node in alone.calls()):
            raise RuntimeError("no such inputs")
        return meant(alone, *args, **kwargs)

    compiled = kernels(SMALL)
    meant = one_call.meaning
    monkeypatch.setattr(one_call, "meaning", fails)
    verdict = blame(compiled, SMALL)
    assert verdict is not None and (verdict.kind, verdict.op) == (Kind.BACKEND, "ingot.silu_mul"), verdict
    assert "no such inputs" in verdict.found


def test_a_step_that_fails_between_instructions_names_the_last(
    kernels: Compiled, blame: Blame, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_artifact(kernels(SMALL))
    for bucket in loaded.executor._lanes[0]:
        second = next(index for index, step in enumerate(bucket._steps) if step.what == "ingot.silu_mul")
        bucket._steps[second] = replace(bucket._steps[second], frees=(10**6,))
    verdict = blame(kernels(SMALL), SMALL, loaded=loaded)
    assert verdict is not None and verdict.op == "ingot.silu_mul" and "fails after it" in verdict.found, verdict


def test_a_reused_buffer_is_named(kernels: Compiled, blame: Blame, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with one buffer for all its calls: a value that is still to be read is overwritten."""

    def reusing(kernel: Kernel) -> Kernel:
        buffers: dict[tuple[int, ...], torch.Tensor] = {}

        def run(*args: Any, **kwargs: Any) -> Any:
            found = kernel(*args, **kwargs)
            buffer = buffers.setdefault(tuple(found[1].shape), torch.empty_like(found[1]))
            return found[0], buffer.copy_(found[1])

        return run

    compiled = kernels("qwen3-scaled")
    plant(monkeypatch, "add_rms_norm", reusing)
    verdict = blame(compiled, "qwen3-scaled")
    assert verdict is not None and (verdict.kind, verdict.op) == (Kind.BACKEND, "ingot.add_rms_norm"), verdict
    assert f"writes into '{verdict.tensor}'" in verdict.found


def test_an_executor_that_gives_another_value_is_named(kernels: Compiled, blame: Blame) -> None:
    loaded = load_artifact(kernels("qwen3-scaled"))
    for bucket in loaded.executor._lanes[0]:
        norms = [index for index, step in enumerate(bucket._steps) if step.what == "ingot.add_rms_norm"]
        (first, _), *rest = bucket._steps[norms[1]].slots
        bucket._steps[norms[1]] = replace(bucket._steps[norms[1]], slots=((first, rest[0][1]), *rest))
    verdict = blame(kernels("qwen3-scaled"), "qwen3-scaled", loaded=loaded)
    assert verdict is not None and (verdict.kind, verdict.blamed) == (Kind.PLAN, "executor"), verdict
    assert verdict.op == "ingot.add_rms_norm" and "differs from the value that was made" in verdict.found


def test_where_an_overflow_starts(kernels: Compiled, blame: Blame, tmp_path: Path) -> None:
    """The numbers themselves are too large for float16: no kernel computes wrongly."""
    folder = CHECKPOINTS[SMALL].write(tmp_path / "large")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 3e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    compile_model(folder, tmp_path / "large.ingot", dtype="float16", max_batch=4, max_tokens=256, max_seq_len=128)
    verdict = blame(tmp_path / "large.ingot", folder)
    assert verdict is not None and verdict.kind is Kind.OVERFLOW, verdict
    assert (verdict.op, verdict.layer) == ("ingot.linear", 0) and "cannot hold" in verdict.found


@pytest.mark.parametrize(
    "name", quick(["another epsilon", "a scale", "a mask edge", "a stale cache", "no residual"], "another epsilon")
)
def test_sixteen_bits_hide_no_fault(
    name: str, kernels: Compiled, blame: Blame, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, fault, _ = FAULTS[name]
    compiled = kernels(SMALL, dtype="bfloat16")
    plant(monkeypatch, op, fault)
    verdict = blame(compiled, SMALL)
    assert verdict is not None and verdict.op == f"ingot.{op}", verdict


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", quick(["float32", "bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("name", quick(TINY, "gemma2-capped", "smollm3-nope"))
def test_no_fault_is_found_in_a_healthy_artifact(name: str, dtype: str, kernels: Compiled, blame: Blame) -> None:
    assert blame(kernels(name, dtype=dtype), name) is None


def test_the_reproducer_shows_the_fault_and_passes_without(
    kernels: Compiled, blame: Blame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = kernels(SMALL)
    with monkeypatch.context() as patch:
        plant(patch, "add_rms_norm", option("eps", lambda eps: eps * 2))
        verdict = blame(compiled, SMALL, reproducer=tmp_path / "fault")
        assert verdict is not None and verdict.reproducer == tmp_path / "fault" / "reproduce.py"
        assert verdict.golden is not None and "ingot.add_rms_norm" in verdict.golden.read_text()
        assert "is" in (rerun(tmp_path / "fault") or "")
        assert reproduce(tmp_path / "fault") == 1
        assert "from ingot.reproduce import reproduce" in verdict.reproducer.read_text(), "the name that stays"
    assert rerun(tmp_path / "fault") is None and reproduce(tmp_path / "fault") == 0
    (tmp_path / "fault" / "call.ir").unlink()
    assert reproduce(tmp_path / "fault") == 2, "neither there nor gone"

"""The cpu backend: its C++ kernels against the float64 references, how its library is built, a model through it."""

import contextlib
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_table import patch_entry, without_inductor

from ingot.backends.cpu.emit import Cpu
from ingot.backends.cpu.load import load_library
from ingot.backends.table import choices
from ingot.backends.toolchain import compiler_path
from ingot.compile import driver as compiler
from ingot.compile.emitter import Emitter
from ingot.ir.artifact.plan import FEW_TOKENS, Executable
from ingot.ir.errors import BackendError, TargetError
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.machine.target import Target
from ingot.ir.masks import Mask
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.runtime.loading.load_context import on_one_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Library = Mapping[str, Callable[..., Any]]

pytestmark = [pytest.mark.xdist_group("cpu-kernels"), pytest.mark.one_in_file(3)]


@dataclass
class Step:
    """Sequences over permuted pages, with NaN wherever nothing of theirs was written; q lies inside a wider product."""

    q: torch.Tensor
    kv: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    kv_lens: torch.Tensor
    sinks: torch.Tensor

    def args(self, sinks: bool, slopes: bool = False) -> tuple[torch.Tensor | None, ...]:
        args = (self.q, self.kv, self.table, self.starts, self.lens, self.kv_lens)
        last = self.sinks if sinks else None
        if slopes:
            return (*args, last, None, None, torch.linspace(0.5, 0.02, self.q.shape[1]))
        return (*args, last) if sinks else args

    def exact(self, sinks: bool, slopes: bool = False, **options: Any) -> torch.Tensor:
        given = self.args(sinks, slopes)
        wide = (arg.double() if arg is not None and arg.is_floating_point() else arg for arg in given)
        expected: torch.Tensor = OPS["paged_attention"].reference(*wide, **options)
        return expected

    def alone(self, b: int) -> "Step":
        """The step of one sequence."""
        rows = slice(int(self.starts[b]), int(self.starts[b] + self.lens[b]))
        one = slice(b, b + 1)
        zero = self.starts[:1] * 0
        return Step(self.q[rows], self.kv, self.table[one], zero, self.lens[one], self.kv_lens[one], self.sinks)


def step(
    counts: list[int],
    kv_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    mask: str = "causal",
    padding: int = 2,
    seed: int = 0,
) -> Step:
    g = torch.Generator().manual_seed(seed)
    width = max(1, *(-(-n // page) for n in kv_lens))
    table = torch.randperm(len(counts) * width + 3, generator=g)[: len(counts) * width].view(len(counts), width).int()
    kv = torch.full((len(counts) * width + 3, 2, page, kv_heads, dim), math.nan, dtype=dtype)
    for b, length in enumerate(kv_lens):
        places = torch.arange(length)
        where = table[b, places // page].long(), places % page
        for part in (0, 1):
            kv[:, part][where] = torch.randn(length, kv_heads, dim, generator=g).to(dtype)
        unread = max(0, Mask.named(mask).first(length - counts[b])) // page
        kv[table[b, :unread].long()] = math.nan
        table[b, :unread] = 2**30  # neither pages that no query sees nor those past the end are read
        table[b, -(-length // page) :] = 2**30
    total = sum(counts) + padding
    merged = torch.randn(total, (heads + 2) * dim, generator=g).to(dtype)
    q = merged[:, dim : dim + heads * dim].view(total, heads, dim)
    starts = [sum(counts[:b]) for b in range(len(counts))]
    ints = [torch.tensor(values, dtype=torch.int32) for values in (starts, counts, kv_lens)]
    return Step(q, kv, table, *ints, torch.randn(heads, generator=g).to(dtype))


def check(library: Library, one: Step, *, sinks: bool = False, slopes: bool = False, **options: Any) -> torch.Tensor:
    options = {"scale": 0.4, **options}
    found: torch.Tensor = library["ingot.paged_attention"](*one.args(sinks, slopes), **options)
    assert found.dtype == one.q.dtype and found.is_contiguous()
    # torch's attention, for many tokens of a sequence, rounds the weights to bfloat16 too.
    factor = 2 if one.q.dtype is torch.bfloat16 and len(one.q) >= 16 * len(one.lens) else 1
    problem = compare(found, one.exact(sinks, slopes, **options), one.q.dtype, factor=factor)
    assert problem is None, problem
    return found


VARIANTS: list[dict[str, Any]] = [
    {},
    {"mask": "window_1"},
    {"mask": "window_19"},
    {"mask": "chunked_19"},
    {"mask": "bidirectional"},
    {"mask": "block_causal_8"},
    {"soft_cap": 1.5},
    {"sinks": True},
    {"mask": "window_33", "soft_cap": 2.0, "sinks": True},
    {"slopes": True},
    {"mask": "bidirectional", "slopes": True},
    {"mask": "window_33", "soft_cap": 2.0, "sinks": True, "slopes": True},
]
# Tokens fed and positions cached of each sequence. The last two have sixteen tokens a sequence, which torch computes.
STEPS = {
    "decode": ([1, 1, 1, 1], [1, 16, 17, 70]),
    "decode of one": ([1], [40]),
    "mixed": ([7, 1, 3, 1], [7, 33, 50, 16]),
    "prefill in chunks": ([9, 14], [25, 14]),
    "padding": ([0, 1, 0, 3, 0], [0, 21, 0, 19, 0]),
    "nothing but padding": ([0, 0], [0, 0]),
    "long prefill": ([40], [40]),
    "long prefill with padding": ([37, 0, 25], [53, 0, 25]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_attention_is_the_float64_reference(
    name: str, variant: dict[str, Any], dtype: torch.dtype, library: Library
) -> None:
    counts, kv_lens = STEPS[name]
    found = check(library, step(counts, kv_lens, dtype=dtype, mask=variant.get("mask", "causal")), **variant)
    assert torch.equal(found[sum(counts) :], torch.zeros_like(found[sum(counts) :])), "rows of no sequence are zero"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", ["decode", "mixed", "padding", "long prefill"])
def test_parts_of_attention_are_the_float64_reference(
    name: str, sinks: bool, dtype: torch.dtype, library: Library
) -> None:
    """The end of each sequence, and a beginning that is shorter than what some feed, and of some is not there."""
    one = step(*STEPS[name], dtype=dtype)
    beginning = replace(one, kv_lens=torch.where(one.kv_lens % 2 == 1, one.kv_lens // 4, 0).int())
    for part, mask in ((one, "causal"), (one, "window_19"), (beginning, "bidirectional")):
        options = {"scale": 0.4, "mask": mask}
        found = library["ingot.partial_attention"](*part.args(sinks), **options)
        wide = [arg.double() if arg is not None and arg.is_floating_point() else arg for arg in part.args(sinks)]
        expected = OPS["partial_attention"].reference(*wide, **options)
        for one_result, other, tolerance in zip(found, expected, (dtype, torch.float32), strict=True):
            problem = compare(one_result, other, tolerance, factor=2)
            assert problem is None, problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("name", ["decode", "mixed", "padding", "long prefill"])
def test_trees_are_the_float64_reference(name: str, sinks: bool, dtype: torch.dtype, library: Library) -> None:
    """A token of a step sees itself and some of those that are fed before it, and one sees all."""
    one, draw = step(*STEPS[name], dtype=dtype), random.Random(3)
    ancestors = torch.zeros(len(one.q), dtype=torch.int64)
    for start, count in zip(one.starts.tolist(), one.lens.tolist(), strict=True):
        for node in range(count):
            ancestors[start + node] = 0 if node == 5 else draw.getrandbits(node) | 1 << node
    places = (one.q, one.kv, one.table, one.starts, one.lens, one.kv_lens, one.sinks if sinks else None, ancestors)
    found = library["ingot.paged_attention"](*places, scale=0.4, mask="tree")
    wide = [arg.double() if arg is not None and arg.is_floating_point() else arg for arg in places]
    expected = OPS["paged_attention"].reference(*wide, scale=0.4, mask="tree")
    problem = compare(found, expected, dtype, factor=2)
    assert problem is None, problem


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (16, 8), (5, 5)])
@pytest.mark.parametrize("dim", [16, 18, 34, 48, 57, 64, 80, 96, 128])
def test_every_shape_of_heads(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, library: Library) -> None:
    one = step([1, 4, 1], [23, 9, 35], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, seed=dim + heads)
    check(library, one, scale=dim**-0.5)


@pytest.mark.parametrize("seed", range(40))
def test_random_steps(seed: int, library: Library) -> None:
    draw = random.Random(seed)
    counts = [draw.choice([0, 1, 1, 1, 2, 5, 15, 31]) for _ in range(draw.randint(1, 6))]
    kv_lens = [count and count + draw.randint(0, 90) for count in counts]
    kv_heads = draw.randint(1, 4)
    size = draw.randint(1, 60)
    mask = draw.choice(
        ["causal", "bidirectional", *(f"{kind}_{size}" for kind in ("window", "chunked", "block_causal"))]
    )
    one = step(
        counts,
        kv_lens,
        heads=kv_heads * draw.randint(1, 5),
        kv_heads=kv_heads,
        dim=draw.randint(8, 64) * 2,
        page=draw.choice([1, 4, 16, 32]),
        dtype=draw.choice(DTYPES),
        mask=mask,
        padding=draw.randint(0, 3),
        seed=seed,
    )
    options = {"mask": mask, "soft_cap": draw.choice([None, 3.0]), "sinks": draw.random() < 0.5}
    options["slopes"] = draw.random() < 0.3
    check(library, one, scale=0.2, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", [{}, {"mask": "window_1000"}, {"sinks": True}, {"slopes": True}], ids=str)
def test_long_contexts(variant: dict[str, Any], dtype: torch.dtype, library: Library) -> None:
    one = step([1, 3], [5000, 2011], dim=32, dtype=dtype, mask=variant.get("mask", "causal"))
    check(library, one, **variant)


@pytest.mark.parametrize("scale", [3.0, 40.0])
def test_scores_of_any_size(scale: float, library: Library) -> None:
    """The softmax never overflows, whichever page holds the highest score."""
    one = step([1, 2], [90, 45], dim=64)
    one.kv[one.table[0, 3], 0, 5] *= 30  # the peak comes late: what was summed before is scaled down to nothing
    # A score of a thousand is off by 1e-4 in float32, and so is a weight.
    found = library["ingot.paged_attention"](*one.args(True), scale=scale)
    assert bool(found.isfinite().all())
    assert compare(found, one.exact(True, scale=scale), torch.float32, factor=100) is None
    one.sinks.fill_(1e30)
    assert bool((library["ingot.paged_attention"](*one.args(True), scale=0.1)[:3] == 0).all()), "sinks take all"


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_a_nan_that_is_seen_shows(part: int, library: Library) -> None:
    """A broken cache must not look like a healthy one."""
    one = step([1, 1], [40, 20])
    one.kv[one.table[0, 1], part, 3] = math.nan
    found = library["ingot.paged_attention"](*one.args(False), scale=0.4)
    assert bool(found[0].isnan().all()) and bool(found[1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_sequence_alone_gets_the_same_bits(variant: dict[str, Any], dtype: torch.dtype, library: Library) -> None:
    """Within the kernel; where torch takes over, for many tokens of a sequence, bits may differ."""
    variant = dict(variant)
    one, sinks = step([1, 5, 0, 1, 15], [37, 5, 0, 80, 61], dim=40, dtype=dtype), variant.pop("sinks", False)
    attention, slopes = library["ingot.paged_attention"], variant.pop("slopes", False)
    whole = attention(*one.args(sinks, slopes), scale=0.4, **variant)
    for b, (start, count) in enumerate(zip(one.starts.tolist(), one.lens.tolist(), strict=True)):
        alone = attention(*one.alone(b).args(sinks, slopes), scale=0.4, **variant)
        assert torch.equal(alone, whole[start : start + count])


def test_threads_do_not_change_the_bits(library: Library) -> None:
    one = step([1] * 6, [300, 10, 170, 64, 5, 999], heads=8, dim=64)
    assert torch.equal(check(library, one), check(library, one))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "dim", "page"), [(2, 16, 16), (1, 57, 4), (8, 128, 16), (3, 34, 1)])
def test_kv_append_writes_rows_of_a_wider_product(
    kv_heads: int, dim: int, page: int, dtype: torch.dtype, library: Library
) -> None:
    g = torch.Generator().manual_seed(dim)
    width = kv_heads * dim
    for tokens in (1, 7, 33):
        merged = torch.randn(tokens, 3 * width + 5, generator=g).to(dtype)
        k = merged[:, 5 : 5 + width].view(tokens, kv_heads, dim)
        v = merged[:, 5 + 2 * width :].view(tokens, kv_heads, dim)
        assert k.stride(0) != width or tokens == 1
        pages = -(-50 // page)
        slots = torch.randperm(pages * page, generator=g)[:tokens]
        slots[torch.rand(tokens, generator=g) < 0.3] = -1
        kv = torch.randn(pages, 2, page, kv_heads, dim, generator=g).to(dtype)
        kv[0, 0, 0] = math.nan
        expected = OPS["kv_append"].reference(kv, k, v, slots)
        place = kv.data_ptr()
        assert library["ingot.kv_append"](kv, k, v, slots) is None
        assert kv.data_ptr() == place
        assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8)), "to the bit, NaN included"


# --- the library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INGOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass
class Counting(Cpu):
    built: int = 0

    def emit_library(self, key: str, target: Target, directory: Path) -> Executable:
        self.built += 1
        (directory / "kernels.so").write_bytes(b"as if compiled")
        return Executable(id=key, backend=self.name, inputs=(), outputs=(), files=("kernels.so",))


def test_the_library_is_built_once(own_cache: Path) -> None:
    backend, target = Counting(), Target.detect("cpu")
    first, second = Emitter({}, target, 1), Emitter({}, target, 1)
    found = [first.emit_library(backend), first.emit_library(backend), second.emit_library(backend)]
    assert backend.built == 1 and found[0] == found[1] == found[2]
    assert second.hits == {found[0].id} and second.seconds == {found[0].id: 0.0}
    file = second.folders[found[0].id] / "kernels.so"
    assert own_cache in file.parents
    file.write_bytes(b"damaged")
    Emitter({}, target, 1).emit_library(backend)
    assert backend.built == 2 and file.read_bytes() == b"as if compiled"


def test_without_a_compiler_the_error_names_what_was_looked_for(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(TargetError, match=r"no C\+\+ compiler was found") as caught:
        Emitter({}, Target.detect("cpu"), 1).emit_library(Cpu())
    assert caught.value.where == "looked for g++, clang++" and "--backend reference" in caught.value.hint
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(TargetError) as caught:
        compiler_path()
    assert caught.value.where == "looked for no-such-compiler"


def test_a_compiler_that_fails_is_an_error_with_its_words(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'kernels.cpp:1: the disk is on fire' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BackendError, match="cannot build the kernels") as caught:
        Emitter({}, Target.detect("cpu"), 1).emit_library(Cpu())
    assert "the disk is on fire" in caught.value.where
    assert not any((own_cache / "exe").iterdir()), "nothing half-built is left"


def test_a_library_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"not a library")
    executable = Executable(id="x", backend="cpu", inputs=(), outputs=(), files=("kernels.so",))
    with pytest.raises(BackendError, match="the library does not load") as caught:
        load_library(executable, tmp_path, on_one_device("cpu"))
    assert caught.value.where == str(tmp_path / "kernels.so")


# --- a model ---------------------------------------------------------------------------------------------------------


def test_a_model_is_served_by_the_kernels(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny import TINY

    from ingot.frontend.checkpoint import Checkpoint
    from ingot.frontend.trace import Limits, trace
    from ingot.models.architectures import read_spec
    from ingot.runtime.loading.loader import load_artifact

    assert "cpu" in choices("cpu")["auto"] and "cpu" not in choices("cpu")["reference"]
    without_inductor(monkeypatch)
    name = "mistral-window"
    limits = {"max_seq_len": TINY[name].max_seq_len, "max_batch": 8, "max_tokens": 1024}
    report = compiler.compile_model(checkpoint(name), tmp_path / "out.ingot", backend="auto", jobs=1, **limits)
    again = compiler.compile_model(checkpoint(name), tmp_path / "again.ingot", backend="auto", jobs=1, **limits)
    assert again.request_key == report.request_key
    assert len(json.loads((again.output / "timings.json").read_text())["cached"]) == 1, "the library of kernels"
    # In each bucket class, a layer: norm, q/k/v, rope and write, attention, o, norm, gate and up, silu, down; at the
    # end a norm and the head; and the ends of the step.
    assert report.nodes_per_backend["cpu"] == 2 * (9 * 3 + 2 + 3)

    loaded = load_artifact(tmp_path / "out.ingot", num_pages=64)
    for bucket in loaded.plan.buckets:
        by_target = {(one.target, one.backend) for one in bucket.instructions if "kv" in str(one.args)}
        assert by_target == {("ingot.qk_norm_rope_append", "cpu"), ("ingot.paged_attention", "cpu")}
    assert [bucket.bucket.name for bucket in loaded.plan.buckets] == ["decode", "extend"]
    assert set(loaded.plan.libraries) == {"cpu"}

    opened = Checkpoint.open(checkpoint(name))
    program = trace(read_spec(opened.config), Limits(**limits)).entries["main"]
    run = InterpreterRun(program, load_params(program.params, opened.read))
    requests = TINY[name].prompts()
    expected = teacher_forced(program.input_types(), run, requests)
    for chunk in (None, 7):
        found = served_logits(loaded.executor, requests, chunk)
        for rows, wanted in zip(found, expected, strict=True):
            assert float((rows.log_softmax(-1) - wanted.log_softmax(-1)).abs().max()) < 1e-4


def test_a_step_of_few_tokens_keeps_torch_to_one_thread(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny import TINY

    from ingot.runtime.loading.loader import load_artifact

    seen: list[tuple[int, int]] = []

    def counting(executable: Executable, directory: Path, context: LoadContext) -> Library:
        library = dict(load_library(executable, directory, context))
        linear = library["ingot.linear"]

        def counted(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            seen.append((x.shape[0], torch.get_num_threads()))
            if len(seen) == 1:
                raise RuntimeError("the first call fails")
            return linear(x, *rest)

        return {**library, "ingot.linear": counted}

    without_inductor(monkeypatch)
    name = "mistral-window"
    limits = {"max_seq_len": TINY[name].max_seq_len, "max_batch": 8, "max_tokens": 64}
    compiler.compile_model(checkpoint(name), tmp_path / "out.ingot", jobs=1, **limits)
    patch_entry(monkeypatch, "cpu", library=counting)
    executor = load_artifact(tmp_path / "out.ingot", num_pages=64).executor
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for step in ("fails", "runs"):
            with contextlib.suppress(BackendError):
                served_logits(executor, [list(range(1, 30))], chunk=21)
            assert torch.get_num_threads() == 2, f"after a step that {step}"
    finally:
        torch.set_num_threads(before)
    assert 8 <= FEW_TOKENS < 21 and set(seen[1:]) == {(21, 2), (8, 1)}


def served_logits(executor: Any, requests: list[list[int]], chunk: int | None) -> list[torch.Tensor]:
    for state in executor.states.values():
        state.fill_(math.nan if state.is_floating_point() else 0)
    return teacher_forced(
        executor.inputs, lambda inputs: executor.launch(inputs).outputs, requests, chunk=chunk, pages=64, seed=2
    )


def test_deterministic_artifacts_take_all_but_attention() -> None:
    """Attention takes another way for many tokens of a sequence, so its bits depend on the batch."""
    from ingot.ir.artifact.plan import BucketClass
    from ingot.ir.backend import Yes
    from ingot.ir.parse import parse_program

    text = (Path(__file__).parents[1] / "ir" / "goldens" / "cached.ir").read_text(encoding="utf-8")
    bucket = BucketClass(name="any", tokens=(1, 90))
    answers = {node.target: Cpu().claim([node], Target.detect("cpu"), bucket) for node in parse_program(text).calls()}
    claimed = {target: answer for target, answer in answers.items() if isinstance(answer, Yes)}
    assert {OPS[name].overload for name in ("kv_append", "paged_attention", "linear")} <= set(claimed)
    assert [t for t, answer in claimed.items() if not answer.batch_invariant] == [OPS["paged_attention"].overload]
    assert all(path.exists() for path in Cpu().sources())

"""Two programs of one model: a draft of fewer layers proposes, `main` verifies, and rejected tokens are taken back.

The draft is the first layers of the decoder and its head. Both entries go through the pipeline into one artifact, share
its weights, its caches and its device rows, and decode speculatively to the tokens of plain greedy decoding.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from changed_definition import change_definition
from gpu_model import LIMITS, MODEL
from hand_step import ON_DEVICE, hand_step
from resign import edit_json
from tiny import TINY
from torch import nn
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, compile_model
from ingot.cli.main import INGOT, run
from ingot.ir import ops, recipe
from ingot.ir.artifact.record import Numerics
from ingot.ir.cache.memory import MemoryNeed
from ingot.ir.errors import ArtifactError, OptionError, VerifyError
from ingot.ir.ops import Op, Sample, define
from ingot.ir.parse import parse_program
from ingot.ir.placements import whole
from ingot.ir.program import ParamSpec, Program, Stage, merged_params, named_arguments
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry
from ingot.models.blocks.decoder import Decoder
from ingot.models.blocks.positions import Positions
from ingot.passes import pipeline
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter
from ingot.runtime.cuda import executor as cuda_executor
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.cuda.graphs import staging
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.steps.bucket import Call

# One worker, for the artifact that the tests share.
pytestmark = pytest.mark.xdist_group("two-entries")

NAME = "llama-plain"
DRAFT_LAYERS = 2  # of three
PROMPTS = [TINY[NAME].prompts()[index] for index in (1, 4, 5)]  # 2, 17 and 33 tokens
PROPOSED = (4, 1, 3)  # tokens of the draft for each sequence
NEW_TOKENS = 40
PAGE, PAGES = 16, 24


class SomeLayers(nn.Module):
    """Some layers of a decoder, its norm and its head."""

    def __init__(self, decoder: Decoder, layers: slice) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = decoder.embed, decoder.layers[layers], decoder.norm
        self.head, self.ropes = decoder.head, decoder.ropes

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, token_seqs: torch.Tensor, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        at = Positions(positions, token_seqs, tuple(self.ropes))
        h = self.embed(tokens, at)
        for layer in self.layers:
            h = layer(h, at)
        return self.head(self.norm(ops.select_rows(h, logit_rows)))


def draft_entry(spec: Any, module: Decoder) -> dict[str, Entry]:
    return {"draft": Entry(SomeLayers(module, slice(0, DRAFT_LAYERS)))}


def accept_op() -> dict[str, Op]:
    def samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
        rows = torch.arange(4, dtype=torch.int32)
        return [Sample((rows, rows, rows, torch.tensor([0, 2]).int(), torch.tensor([2, 2]).int()))]

    @define(
        placement=whole,
        flops=1,
        samples=samples,
        fake=lambda tokens, sampled, logit_rows, q_starts, q_lens: torch.empty_like(q_lens),
        fusible=False,
        legal="cached",
    )
    def toy_accept(
        tokens: torch.Tensor,
        sampled: torch.Tensor,
        logit_rows: torch.Tensor,
        q_starts: torch.Tensor,
        q_lens: torch.Tensor,
    ) -> torch.Tensor:
        """How many of the tokens fed are rejected, i32[B]: those behind the first row whose sampled token is not the
        one that was fed next."""
        ends = q_starts + q_lens
        follows = (logit_rows + 1).clamp(max=tokens.shape[0] - 1).long()
        inside = (logit_rows >= q_starts[:, None]) & (logit_rows + 1 < ends[:, None])  # [B, L]
        wrong = inside & (tokens[follows] != sampled)
        kept = torch.where(wrong, logit_rows + 1, ends[:, None]).amin(-1)
        return (ends - kept).int()

    return {"toy_accept": toy_accept}


@dataclass(frozen=True)
class AcceptDrafts(Pass):
    """`advance` takes back the tokens that were fed and not sampled; their number is an output."""

    name: ClassVar[str] = "toy-accept-drafts"
    numerics: ClassVar[Numerics] = Numerics.LOSSY  # rows go back where drafts are rejected
    joins: ClassVar[Stage] = Stage.CACHED

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        (fed,) = program.calls(ops.feed.overload)
        (moved,) = program.calls(ops.advance.overload)
        rewriter.take(moved)
        ids = next(user for user in fed.users if user.args[1] == 0)
        sampled = named_arguments(moved)["sampled"]
        accept = ops.OPS["toy_accept"]
        places = [program.find(name) for name in ("logit_rows", "q_starts", "q_lens")]
        rejected = rewriter.call(accept, ids, sampled, *places, before=moved)
        moved.args = (*moved.args, rejected)
        program.set_outputs({"rejected": rejected, **program.output_nodes()})


@pytest.fixture(scope="module", autouse=True)
def accept() -> Iterator[None]:
    with toy_ops(accept_op):
        yield


@pytest.fixture(scope="module")
def folder(accept: None, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The artifact with both entries. Deterministic: a step of five tokens then gives the bits of five steps."""
    output = tmp_path_factory.mktemp("two-entries") / "both.ingot"
    with pytest.MonkeyPatch.context() as patch:
        change_definition(patch, "LlamaForCausalLM", more_entries=draft_entry)
        patch.setattr(pipeline, "load_user_pass", {AcceptDrafts.name: AcceptDrafts}.get)
        compile_model(
            checkpoint(NAME),
            output,
            backend="reference",
            deterministic=True,
            max_batch=4,
            max_tokens=128,
            max_seq_len=128,
            passes=f"default,{AcceptDrafts.name}",
        )
    yield output


def test_one_tensor_for_both(folder: Path) -> None:
    loaded = load_artifact(folder, num_pages=PAGES)
    main, draft = loaded.executors["main"], loaded.executors["draft"]
    assert set(loaded.plans.plans) == {"main", "draft"} and loaded.plan.entry == "main" and loaded.executor is main
    assert draft.states is main.states and draft.plan.states.keys() == main.plan.states.keys() - {"kv.2"}
    assert set(draft.plan.params) < set(main.plan.params) and "layers.1.attention.q_k_v.weight" in draft.plan.params
    assert not any(name.startswith("layers.2") for name in draft.plan.params)
    for name in draft.plan.params:
        assert draft.params[name].data_ptr() == main.params[name].data_ptr()
    index = json.loads((folder / "weights.json").read_text())
    assert index.keys() == main.plan.params.keys(), "a weight of the draft was packed again"


def test_every_view_shows_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def inspect(*options: str) -> str:
        assert run(INGOT, ["inspect", str(folder), *options]) == 0
        return capsys.readouterr().out

    summary = json.loads(inspect("--json"))
    assert {bucket["name"] for bucket in summary["buckets"]} == {"any", "draft@any"}
    entries = [one["entry"] for one in summary["passes"]]
    half = len(entries) // 2
    assert entries == ["main"] * half + ["draft"] * half and all(
        one["seconds"] is not None for one in summary["passes"]
    )
    for name in ("normalize", "make-plan", AcceptDrafts.name):
        texts = json.loads(inspect("--pass", name, "--json"))
        keys = {"main": "any", "draft": "draft@any"} if name == "make-plan" else {"main": "", "draft": "draft"}
        assert {parse_program(text).name: key for key, text in texts.items()} == keys
    traced = inspect("--stage", "traced")
    assert traced.count("program main") == traced.count("program draft") == 1
    assert json.loads((folder / "choices.json").read_text()).keys() == {"any", "draft@any"}


@dataclass
class Sequence:
    """One sequence: its tokens, its device row, its pages, and how much of it lies in the caches."""

    tokens: list[int]
    row: int
    pages: list[int]
    proposed: int
    cached: int = 0


def test_draft_and_verify_is_plain_greedy_decoding(folder: Path) -> None:
    plain = LLM(folder, num_kv_pages=PAGES).generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
    )
    expected = [output.outputs[0].token_ids for output in plain]

    loaded = load_artifact(folder, num_pages=PAGES)
    main, draft, states = loaded.executors["main"], loaded.executors["draft"], loaded.executor.states
    caches = [tensor for name, tensor in states.items() if name.startswith("kv.")]
    for cache in caches:
        cache.fill_(float("nan"))
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3)).tolist()
    room = [-(-(len(prompt) + NEW_TOKENS + max(PROPOSED)) // PAGE) for prompt in PROMPTS]
    pages = [[order.pop() for _ in range(count)] for count in room]
    sequences = [Sequence(list(PROMPTS[b]), (2, 0, 3)[b], pages[b], PROPOSED[b]) for b in range(len(PROMPTS))]

    def launch(executor: Any, some: list[Sequence], fed: list[list[int]], starts: list[int], **options: bool) -> Any:
        rows, tables = [one.row for one in some], [one.pages for one in some]
        return executor.launch(hand_step(fed, starts, rows, tables, **options))

    def commit(some: list[Sequence], lengths: list[int]) -> None:
        """Move on; poison what lies behind the committed tokens, and see that the rows were moved back there."""
        for one, length in zip(some, lengths, strict=True):
            one.cached = length
            assert int(states["position"][one.row]) == length and int(states["last_token"][one.row]) == one.tokens[-1]
            assert len(one.tokens) == length + 1
            places = torch.arange(length, len(one.pages) * PAGE)
            page = torch.tensor(one.pages)[places // PAGE]
            for cache in caches:
                cache[page, :, places % PAGE] = float("nan")

    handle = launch(main, sequences, [one.tokens for one in sequences], [0] * len(sequences))
    assert handle.outputs["rejected"].tolist() == [0, 0, 0], (
        "a prompt has one row of logits, and all of it is committed"
    )
    for one, token in zip(sequences, handle.tokens(), strict=True):
        one.tokens.append(token)
    commit(sequences, [len(prompt) for prompt in PROMPTS])

    committed: set[tuple[int, int]] = set()  # (tokens proposed, tokens committed)
    while active := [one for one in sequences if len(one.tokens) < len(PROMPTS[sequences.index(one)]) + NEW_TOKENS]:
        guesses: dict[int, list[int]] = {one.row: [] for one in active}
        for step in range(max(one.proposed for one in active)):
            some = [one for one in active if one.proposed > step]
            handle = launch(draft, some, [[ON_DEVICE]] * len(some), [ON_DEVICE] * len(some))
            for one, token in zip(some, handle.tokens(), strict=True):
                guesses[one.row].append(token)
        fed = [[one.tokens[-1], *guesses[one.row]] for one in active]
        handle = launch(main, active, fed, [one.cached for one in active], every_row=True)
        rows = iter(handle.tokens())
        lengths = []
        for one, tokens, rejected in zip(active, fed, handle.outputs["rejected"].tolist(), strict=True):
            sampled = [next(rows) for _ in tokens]
            count = len(tokens) - rejected
            committed.add((one.proposed, count))
            one.tokens += sampled[:count]
            lengths.append(one.cached + count)
        commit(active, lengths)

    for one, prompt, wanted in zip(sequences, PROMPTS, expected, strict=True):
        assert one.tokens[len(prompt) :][:NEW_TOKENS] == wanted
    counts = {count for _, count in committed}
    assert {1, 2} <= counts and any(count == proposed + 1 for proposed, count in committed), committed
    assert len(counts) >= 3, f"too few ways to be rejected: {sorted(committed)}"


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no main": (lambda plans: plans.pop("main"), "it has no entry 'main'"),
    "under another name": (lambda plans: plans.update(other=plans.pop("draft")), "the plan is for the entry 'draft'"),
    "a state of another type": (
        lambda plans: plans["draft"]["states"]["kv.0"].update(type="f32[pages, 2, 16, 5, 15]"),
        "as in another entry",
    ),
    "a weight of another type": (
        lambda plans: plans["draft"]["params"].update({"norm.weight": "f32[76]"}),
        "as in another entry",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_entries_that_do_not_share_are_refused(folder: Path, tmp_path: Path, case: str) -> None:
    copy = tmp_path / "copy.ingot"
    shutil.copytree(folder, copy)
    edit, message = WRONG[case]
    edit_json(copy, "plan.json", lambda value: edit(value["positions"]["all"]["plans"]))
    with pytest.raises(ArtifactError, match=message):
        load_artifact(copy, num_pages=4)


def test_one_name_is_one_weight() -> None:
    """What two entries call alike has one recipe, or the compile ends before anything is packed."""
    row = ParamSpec(TensorType(torch.float32, (4,)), recipe.source("a"))
    programs = [Program(name, Stage.NORMAL, {}) for name in ("main", "draft")]
    for one in programs:
        one.add_param("norm.weight", row)
    assert merged_params(programs) == {"norm.weight": row}
    other = Program("verify", Stage.NORMAL, {})
    other.add_param("norm.weight", replace(row, recipe=recipe.source("b")))
    with pytest.raises(VerifyError, match=r"the param 'norm\.weight'") as caught:
        merged_params([*programs, other])
    assert caught.value.where == "program verify" and 'source(name="a")' in caught.value.expected


def test_memory_is_planned_for_the_states_of_all_entries(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry has a cache that the other one lacks."""
    parts = {"main": slice(0, DRAFT_LAYERS), "rest": slice(1, None)}
    change_definition(
        monkeypatch,
        "LlamaForCausalLM",
        more_entries=lambda spec, module: {name: Entry(SomeLayers(module, part)) for name, part in parts.items()},
    )
    output = tmp_path / "parted.ingot"
    compile_model(checkpoint(NAME), output, backend="reference", max_batch=4, max_tokens=64, max_seq_len=64)
    loaded = load_artifact(output, num_pages=PAGES)
    caches = {
        entry: {name for name in plan.states if name.startswith("kv.")} for entry, plan in loaded.plans.plans.items()
    }
    assert caches == {"main": {"kv.0", "kv.1"}, "rest": {"kv.1", "kv.2"}}
    need = MemoryNeed.of(loaded.plans)
    allocated = sum(state.nbytes for state in loaded.executor.states.values())
    assert allocated == need.states + PAGES * need.page
    assert load_artifact(output, memory=need.fixed + PAGES * need.page, num_pages=PAGES).num_pages == PAGES
    with pytest.raises(OptionError, match=f"at most {PAGES - 1} pages"):
        load_artifact(output, memory=need.fixed + PAGES * need.page - 1, num_pages=PAGES)


def test_all_entries_run_on_the_stream_of_the_load_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's executors over a CPU's tensors: what they share is ordered by one stream alone."""
    loaded = load_artifact(folder, num_pages=PAGES)
    context = replace(loaded.context, stream="the stream of the artifact")  # type: ignore[arg-type]
    entered: list[object] = [None]

    @contextmanager
    def stream(other: object) -> Iterator[None]:
        entered.append(other)
        yield
        entered.pop()

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(cuda_executor, "to_host", torch.clone)
    monkeypatch.setattr(staging, "to_device", lambda tensor, device: tensor.clone())
    monkeypatch.setattr(cuda_executor, "to_device", lambda tensor, device: tensor.clone())
    seen: dict[str, set[object]] = {"main": set(), "draft": set()}
    for entry, used in seen.items():
        own = loaded.executors[entry]
        executor = CudaExecutor(own.plan, own.params, {}, own.sizes, {}, own.states, context, capture="none")

        def watch(call: Call, used: set[object] = used) -> Any:
            used.add(entered[-1])
            return call()

        executor.launch(hand_step([PROMPTS[0]], [0], [0], [[0, 1]]), watch).tokens()
    assert seen == {entry: {"the stream of the artifact"} for entry in seen}


@pytest.mark.gpu
def test_entries_in_turns_are_as_if_each_step_had_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for between a step of the draft and one of `main` that reads the rows and caches it wrote."""
    change_definition(monkeypatch, "Qwen3ForCausalLM", more_entries=draft_entry)
    compile_model(MODEL.write(tmp_path / "checkpoint"), tmp_path / "a.ingot", target="cuda", **LIMITS)
    draft: Any = ("draft", [[ON_DEVICE]] * 2, [ON_DEVICE] * 2)
    main: Any = ("main", [[ON_DEVICE]] * 2, [ON_DEVICE] * 2)
    steps: Any = [("main", [[3, 4, 5], [6, 7]], [0, 0]), *([draft, main] * 25)]

    def tokens(wait: bool) -> list[list[int]]:
        loaded = load_artifact(tmp_path / "a.ingot", num_pages=PAGES)
        found: list[list[int]] = []
        before = None  # two steps may be in flight
        for entry, fed, starts in steps:
            handle = loaded.executors[entry].launch(hand_step(fed, starts, [0, 1], [[0, 1, 2, 3], [4, 5, 6, 7]]))
            if wait:
                torch.cuda.synchronize()
            if before is not None:
                found.append(before.tokens())
            before = handle
        assert before is not None
        return [*found, before.tokens()]

    expected = tokens(wait=True)
    for _ in range(20):
        assert tokens(wait=False) == expected

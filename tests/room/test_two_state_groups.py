"""Two kinds of state in one model: a paged cache, and a state that stands once per sequence.

The middle layer of a decoder mixes tokens by a causal convolution in place of attention. Traced, the convolution is
pure; a pass gives it the last inputs of each sequence as a state, with a slot to read from and one to write to. The
oracle is transformers' decoder on whole sequences, with torch's own convolution in that layer.
"""

import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import transformers
from hand_step import hand_step
from safetensors.torch import load_file, save_file
from staged import pass_context
from tiny import TINY
from torch import nn
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, compile_model
from ingot.cli.console import size_text
from ingot.cli.views.memory import memory_rows
from ingot.frontend.trace import Limits, trace
from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import InternalError, VerifyError
from ingot.ir.numerics.harness import teacher_forced
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS, Op, Sample, define
from ingot.ir.placements import whole
from ingot.ir.program import Stage, StateSpec, named_arguments, tensor_type
from ingot.ir.types import LOADED_DIMS, Dim, TensorType
from ingot.ir.verify import verify
from ingot.models import architectures
from ingot.models.architectures import ARCHITECTURES, Architecture
from ingot.models.blocks.block import Block
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.layer import LayerSpec
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.positions import Positions
from ingot.models.config import ConfigReader
from ingot.models.families.llama import llama
from ingot.models.params import Place, parameter
from ingot.passes import pipeline
from ingot.passes.base import Pass, PassContext
from ingot.passes.manager import run_pipeline
from ingot.passes.rewrite import Rewriter
from ingot.runtime.loading.loader import Loaded, load_artifact

# One worker, for the artifact that the tests share.
pytestmark = pytest.mark.xdist_group("two-state-groups")

NAME = "llama-plain"
ARCHITECTURE = "ToyHybridForCausalLM"
LAYER, WIDTH = 1, 4  # the layer with the convolution; tokens that it sees
LIMITS = {"max_seq_len": 160, "max_batch": 6, "max_tokens": 256}
PAGE, PAGES = 16, 40
DEPTH_FACTOR = 10.0  # layers of a float32 model amplify rounding: the table's tolerance is for one op
PROMPTS = [prompt for prompt in TINY[NAME].prompts() if len(prompt) in (1, 17, 33, 64)]


def conv_ops() -> dict[str, Op]:
    def convolved(x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [n, C] behind `before` [WIDTH - 1, C], in a sequence."""
        windows = torch.cat([before, x]).unfold(0, weight.shape[1], 1)  # [n, C, WIDTH]
        return (windows * weight).sum(-1)

    def pure_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
        ints = torch.zeros(3, dtype=torch.int32)
        return [Sample((torch.ones(3, 2), torch.ones(2, 4), ints), {"layer": 0})]

    @define(
        placement=whole,
        flops=1,
        samples=pure_samples,
        fake=lambda x, weight, token_seqs, *, layer: torch.empty_like(x),
        fusible=False,
        legal="pure",
    )
    def toy_conv(x: torch.Tensor, weight: torch.Tensor, token_seqs: torch.Tensor, *, layer: int) -> torch.Tensor:
        """A causal convolution of x [T, C] with weight [C, WIDTH] along each sequence, from its beginning."""
        out = torch.empty_like(x)
        for seq in token_seqs.unique():
            mine = token_seqs == seq
            out[mine] = convolved(x[mine], x.new_zeros(weight.shape[1] - 1, x.shape[1]), weight)
        return out

    def step(
        conv: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        q_starts: torch.Tensor,
        q_lens: torch.Tensor,
        state_read: torch.Tensor,
        state_write: torch.Tensor,
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        # Every slot is read before one is written: a slot may be one sequence's to read and another's to write.
        before = torch.where(state_read[:, None, None] >= 0, conv[state_read.clamp(min=0).long()], 0.0)
        for b, (start, count) in enumerate(zip(q_starts.tolist(), q_lens.tolist(), strict=True)):
            mine = slice(start, start + count)
            out[mine] = convolved(x[mine], before[b], weight)
            conv[int(state_write[b])] = torch.cat([before[b], x[mine]])[-conv.shape[1] :]
        return out

    def most(conv: torch.Tensor, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """What `step` allocates for one sequence, which has all tokens."""
        before = torch.where(others[-1][:, None, None] >= 0, conv[others[-1].long()], 0.0)
        out = torch.zeros_like(x)
        out[:] = convolved(x, before[0], others[0])
        return out

    def step_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
        one = torch.zeros(1, dtype=torch.int32)
        return [Sample((torch.zeros(2, 3, 2), torch.ones(1, 2), torch.ones(2, 4), one, one + 1, one, one))]

    @define(
        placement=whole,
        flops=1,
        samples=step_samples,
        fake=lambda conv, x, *_: (torch.empty_like(x), torch.empty_like(conv)),
        states=("conv",),
        in_place=step,
        costliest=most,
        fusible=False,
    )
    def toy_conv_step(
        conv: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        q_starts: torch.Tensor,
        q_lens: torch.Tensor,
        state_read: torch.Tensor,
        state_write: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`toy_conv` of x going on from slot `state_read[b]`, the state with the last inputs at `state_write[b]`)."""
        after = conv.clone()
        out = step(after, x, weight, q_starts, q_lens, state_read, state_write)
        return out, after

    return {"toy_conv": toy_conv, "toy_conv_step": toy_conv_step}


@dataclass(frozen=True)
class InsertConvState(Pass):
    """Each convolution of layer i gets the state `conv.i`: the last inputs of each sequence."""

    name: ClassVar[str] = "toy-insert-conv-state"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    joins: ClassVar[Stage] = Stage.CACHED

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        slots = [program.add_input(name, TensorType(torch.int32, ("B",))) for name in ("state_read", "state_write")]
        written = {}
        for node in list(program.calls(OPS["toy_conv"].overload)):
            rewriter.take(node)
            bound = named_arguments(node)
            x, weight = tensor_type(bound["x"]), tensor_type(bound["weight"])
            name = f"conv.{bound['layer']}"
            assert isinstance(weight.shape[1], int)
            kept = TensorType(x.dtype, ("S", weight.shape[1] - 1, x.shape[1]))
            program.dims["S"] = Dim("S", 1, LOADED_DIMS["S"])
            state = program.add_state(name, StateSpec("conv", "conv", "sequence", kept))
            fed = [program.find("q_starts"), program.find("q_lens")]
            both = rewriter.call(OPS["toy_conv_step"], state, bound["x"], bound["weight"], *fed, *slots, before=node)
            out, written[name] = (rewriter.call(operator.getitem, both, index, before=node) for index in (0, 1))
            rewriter.replace(node, out)
        program.set_outputs({**program.output_nodes(), **written})


class ConvSpec:
    """A convolution in the place of attention."""

    def build(self, place: Place, hidden: int, layer: int) -> "ConvMixer":
        return ConvMixer(place / "mixer", hidden, layer)


class ConvMixer(Block):
    def __init__(self, place: Place, hidden: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Linear(place / "gate", hidden, hidden)
        self.conv = parameter((hidden, WIDTH), place.source("conv"), place.dtype)
        self.o = Linear(place / "out", hidden, hidden)

    def matches(self) -> dict[str, int]:
        return {InsertConvState.name: 1}

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        mixed = OPS["toy_conv"](x, self.conv, at.token_seqs, layer=self.layer)
        return self.o(ops.silu_mul(self.gate(x), mixed))


def read(config: ConfigReader) -> DecoderSpec:
    """Llama with a convolution in one layer."""
    decoder = llama(config)
    layers = list(decoder.layers)
    attention, mlp = layers[LAYER].branches
    layers[LAYER] = LayerSpec((replace(attention, name="mixer", block=ConvSpec()), mlp))
    return replace(decoder, layers=tuple(layers))


HYBRID = Architecture("toy", read, architectures.DECODER)


@pytest.fixture(scope="module", autouse=True)
def hybrid() -> Iterator[None]:
    """The ops, the architecture and the pass are there."""
    with toy_ops(conv_ops), pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, ARCHITECTURE, HYBRID)  # type: ignore[arg-type]  # a dict
        patch.setattr(pipeline, "load_user_pass", {InsertConvState.name: InsertConvState}.get)
        yield


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the hybrid."""
    folder = tmp_path_factory.mktemp("hybrid") / "checkpoint"
    folder.mkdir()
    tensors = load_file(checkpoint(NAME) / "model.safetensors")
    for name in [name for name in tensors if name.startswith(f"model.layers.{LAYER}.self_attn.")]:
        del tensors[name]
    hidden = TINY[NAME].config["hidden_size"]
    g = torch.Generator().manual_seed(5)
    for name, shape in {
        "gate.weight": (hidden, hidden),
        "conv": (hidden, WIDTH),
        "out.weight": (hidden, hidden),
    }.items():
        tensors[f"model.layers.{LAYER}.mixer.{name}"] = torch.randn(shape, generator=g) * 1.5 / shape[1] ** 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**TINY[NAME].config, "architectures": [ARCHITECTURE]}))
    return folder


@pytest.fixture(scope="module")
def folder(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact; deterministic, so that how a sequence is fed does not show in its bits."""
    output = tmp_path_factory.mktemp("hybrid") / "hybrid.ingot"
    passes = f"default,{InsertConvState.name}"
    compile_model(source, output, backend="reference", deterministic=True, passes=passes, **LIMITS)
    return output


@pytest.fixture(scope="module")
def oracle(source: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """Logits of every position of a sequence."""
    tensors = load_file(source / "model.safetensors")
    gate, conv, out = (
        tensors.pop(f"model.layers.{LAYER}.mixer.{name}") for name in ("gate.weight", "conv", "out.weight")
    )

    class Mixer(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            x = F.pad(hidden_states.transpose(1, 2), (WIDTH - 1, 0))
            mixed = F.conv1d(x, conv[:, None], groups=conv.shape[0]).transpose(1, 2)
            return F.linear(F.silu(F.linear(hidden_states, gate)) * mixed, out), None

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY[NAME].config)).eval()
    model.model.layers[LAYER].self_attn = Mixer()
    model.load_state_dict(tensors)

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    return logits


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert compare(found, expected, torch.float32, factor=DEPTH_FACTOR) is None


@pytest.mark.parametrize("chunk", [None, 1, 2, 7])
def test_any_chunks_are_the_whole_sequence(
    folder: Path, oracle: Callable[..., torch.Tensor], chunk: int | None
) -> None:
    """Chunks shorter than the convolution's reach, decode steps among them, and all in one."""
    loaded = load_artifact(folder, num_pages=PAGES)
    prompts = PROMPTS if chunk != 1 else PROMPTS[:2]

    def run(inputs: Any) -> dict[str, torch.Tensor]:
        return loaded.executor.launch(inputs).outputs

    found = teacher_forced(loaded.executor.inputs, run, prompts, chunk=chunk, pages=PAGES, seed=1)
    for rows, prompt in zip(found, prompts, strict=True):
        same(rows, oracle(prompt))


def test_the_state_is_a_value_until_the_plan_updates_it_in_place(folder: Path) -> None:
    loaded = load_artifact(folder, num_pages=PAGES)
    state = loaded.plan.states["conv.1"]
    hidden = TINY[NAME].config["hidden_size"]
    assert (state.kind, state.group, state.unit) == ("conv", "conv", "sequence")
    assert state.type == f"f32[S, {WIDTH - 1}, {hidden}]" and {"kv.0", "kv.2"} <= loaded.plan.states.keys()
    (call,) = (one for one in loaded.plan.buckets[0].instructions if one.target == "ingot.toy_conv_step")
    assert call.updates == ("conv.1",) and len(call.results) == 1
    tensor = loaded.executor.states["conv.1"]
    place = tensor.data_ptr()
    loaded.executor.launch(hand_step([PROMPTS[1]], [0], [3], [[0, 1]]))
    assert loaded.executor.states["conv.1"] is tensor and tensor.data_ptr() == place
    assert [number for number, slot in enumerate(tensor) if slot.any()] == [3]
    told = dict(memory_rows(loaded.plans))["slots"]
    size = (WIDTH - 1) * hidden * 4
    assert loaded.plan.memory.slot == size and str(told).startswith(f"{size_text(size)} a sequence")
    assert len(tensor) == loaded.slots == 3 * loaded.limits.max_batch, "two that are kept for each that runs"


def test_the_verifier_follows_its_versions(source: Path) -> None:
    """A second step from the version that the first one has overwritten."""
    spec = architectures.read_spec(json.loads((source / "config.json").read_text()))
    model = trace(spec, Limits(**LIMITS))
    phases = pipeline.edit_pipeline(f"default,{InsertConvState.name}")
    program = run_pipeline(model, pass_context(), (), phases, upto=Stage.CACHED).fused
    verify(program)
    (first,) = program.calls(OPS["toy_conv_step"].overload)
    rewriter = Rewriter(program)
    again = rewriter.call(OPS["toy_conv_step"], *first.args, before=program.graph.output_node())
    taken = rewriter.call(operator.getitem, again, 0, before=program.graph.output_node())
    program.set_outputs({**program.output_nodes(), "again": taken})
    with pytest.raises(VerifyError, match="overwritten twice"):
        verify(program)


def test_a_pass_that_is_left_out_is_missed(source: Path, tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match=r"op ingot\.toy_conv is not legal here"):
        compile_model(source, tmp_path / "out.ingot", backend="reference", **LIMITS)


def fed(
    loaded: Loaded, tokens: Sequence[int], start: int, row: int, pages: Sequence[int], **slots: Any
) -> torch.Tensor:
    return loaded.executor.launch(hand_step([tokens], [start], [row], [pages], every_row=True, **slots)).outputs[
        "logits"
    ]


def test_a_fork_reads_one_slot_and_writes_another(folder: Path, oracle: Callable[..., torch.Tensor]) -> None:
    """Two continuations of one beginning in one step: both read its slot, and one of them writes it."""
    loaded = load_artifact(folder, num_pages=PAGES)
    begin, (left, right) = PROMPTS[2][:19], ([5, 6, 7, 8, 9], [11, 300])
    fed(loaded, begin, 0, 1, [4, 9])
    loaded.executor.states.copy("full", [4, 9], [7, 2])  # copy-on-write, of pages
    found = loaded.executor.launch(
        hand_step([left, right], [19, 19], [1, 5], [[4, 9], [7, 2]], every_row=True, read=[1, 1], write=[1, 4])
    ).outputs["logits"]
    same(found[:5], oracle([*begin, *left])[19:])
    same(found[5:], oracle([*begin, *right])[19:])
    # The fork goes on from where it was written, and the original from where it was left.
    same(fed(loaded, [17, 3], 21, 5, [7, 2], read=[4], write=[5]), oracle([*begin, *right, 17, 3])[21:])
    same(fed(loaded, [1], 24, 1, [4, 9]), oracle([*begin, *left, 1])[24:])


def test_copy_zero_and_move_by_group(folder: Path, oracle: Callable[..., torch.Tensor]) -> None:
    """What serving does between steps: fork a sequence, move it elsewhere, clear what it leaves."""
    loaded = load_artifact(folder, num_pages=PAGES)
    states = loaded.executor.states
    begin, more = PROMPTS[2][:19], [5, 6, 7]
    expected = oracle([*begin, *more])[19:]
    fed(loaded, begin, 0, 1, [4, 9])

    def everywhere() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in states.items()}

    # A copy, row by row, goes on as the original would; its last token and position came along.
    before = everywhere()
    states.copy("full", [4, 9], [10, 11])
    states.copy("conv", [1], [2])
    states.copy("rows", [1], [2])
    for name, tensor in states.items():
        changed = {place for place in range(tensor.shape[0]) if not torch.equal(tensor[place], before[name][place])}
        assert changed <= ({10, 11} if name.startswith("kv.") else {2})
    assert int(states["position"][2]) == 19
    same(fed(loaded, more, -1, 2, [10, 11], read=[2], write=[2]), expected)

    # A move to places that partly overlap, and nothing stays behind.
    states.move("full", [4, 9], [9, 20])
    states.move("conv", [1], [0])
    assert not states["conv.1"][1].any() and not states["kv.0"][4].any() and states["kv.0"][9].any()
    same(fed(loaded, more, 19, 1, [9, 20], read=[0], write=[0]), expected)

    # A slot that was cleared is one that a sequence can begin with.
    states.zero("conv", [0])
    same(fed(loaded, begin, 0, 1, [4, 9], read=[0], write=[0]), oracle(begin))
    assert states["kv.2"].any()
    states.zero("full", range(PAGES))
    assert not states["kv.0"].any() and not states["kv.2"].any() and states["conv.1"].any()


def test_moves_that_cannot_be_made_are_refused(folder: Path) -> None:
    states = load_artifact(folder, num_pages=PAGES).executor.states
    for arguments, message in [
        (("heads", [0], [1]), "no state is in the group 'heads'"),
        (("full", [0], [PAGES]), f"slot {PAGES} is not in"),
        (("full", [-1], [1]), "slot -1 is not in"),
        (("conv", [0, 1], [2]), "2 sources for 1 targets"),
        (("conv", [0, 1], [2, 2]), "a target is repeated"),
    ]:
        for change in (states.copy, states.move):
            with pytest.raises(InternalError, match=message):
                change(*arguments)
    with pytest.raises(InternalError, match="a target is repeated"):
        states.zero("conv", [1, 1])


def test_served_in_pieces_and_preempted(folder: Path, oracle: Callable[..., torch.Tensor]) -> None:
    """One that was preempted begins again without a state, or with one that was kept."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    whole = [one.outputs[0].token_ids for one in LLM(folder, num_kv_pages=PAGES).generate(prompts, params)]
    tight = LLM(folder, num_kv_pages=8, max_num_batched_tokens=20)
    assert [one.outputs[0].token_ids for one in tight.generate(prompts, params)] == whole
    assert tight._engine._scheduler.num_preemptions
    for prompt, tokens in zip(PROMPTS, whole, strict=True):
        logits = oracle([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()


def test_a_conversation_goes_on_from_its_pages_and_its_state(folder: Path, oracle: Callable[..., torch.Tensor]) -> None:
    """Each turn begins with the last full page of the one before it; what it found it has not computed again."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    shared, alone = LLM(folder, num_kv_pages=PAGES), LLM(folder, num_kv_pages=PAGES, enable_prefix_caching=False)
    turns, found = [*PROMPTS[-1], 5], []
    for more in ([7, 8, 9], [11] * 20):
        turns += more
        one, other = (llm.generate([{"prompt_token_ids": turns}], params)[0] for llm in (shared, alone))
        tokens = list(one.outputs[0].token_ids)
        assert other.outputs[0].token_ids == tokens and other.num_cached_tokens == 0
        assert tokens == oracle([*turns, *tokens[:-1]])[len(turns) - 1 :].argmax(-1).tolist()
        found.append(one.num_cached_tokens)
        computed = len(turns) + len(tokens) - 1
        turns = [*turns, *tokens]
    first = len(PROMPTS[-1]) + 4 + 24 - 1
    assert found == [0, first // 16 * 16] and shared.prefix_cache_stats.hits == found[1] and computed > 64

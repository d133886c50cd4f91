"""A mixture of experts as one op: its routing, its oracle, and a decoder of it from the checkpoint to served tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from specs import changed
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ingot import LLM, SamplingParams, compile_model
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir import build, ops, recipe
from ingot.ir.errors import CheckpointError, VerifyError
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops.moe import group_by_expert, route
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType
from ingot.models.architectures import ARCHITECTURES, DECODER, Architecture, read_spec
from ingot.models.blocks.block import Block
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.layer import BranchSpec
from ingot.models.blocks.linear import Linear
from ingot.models.blocks.positions import Positions
from ingot.models.config import ConfigReader
from ingot.models.families.llama import mistral
from ingot.models.params import Place, parameter
from ingot.runtime.loader import load_artifact

# One worker, for the artifacts that the tests share.
pytestmark = pytest.mark.xdist_group("moe")

LIMITS = {"max_seq_len": 128, "max_batch": 4, "max_tokens": 128}
DEPTH_FACTOR = 10.0  # layers of a float32 model amplify rounding: the table's tolerance is for one op


def randomize(module: nn.Module, seed: int) -> None:
    """Matrices N(0, 2.25/fan_in), so that routing and logits are decided; gains 1 + N(0, 0.09)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.3 * noise)


# --- routing ---------------------------------------------------------------------------------------------------------


def test_routing_has_a_static_bound_and_counts_on_the_device() -> None:
    """T * top_k rows however the tokens are spread; each expert's stand together, in the order of tokens."""
    logits = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    logits[:, 3] -= 100  # nobody's choice
    weights, experts = route(logits, 2, True)
    order, counts = group_by_expert(experts, 5)
    assert order.shape == (18,) and counts.shape == (5,) and int(counts.sum()) == 18 and counts[3] == 0
    assert sorted(order.tolist()) == list(range(18))
    rows = iter(order.tolist())
    for expert in range(5):
        mine = [next(rows) for _ in range(int(counts[expert]))]
        assert mine == [t * 2 + i for t in range(9) for i in range(2) if experts[t, i] == expert]
    assert torch.allclose(weights.sum(-1), torch.ones(9)) and bool((weights[:, 0] >= weights[:, 1]).all())


def test_of_equal_experts_the_first_is_chosen() -> None:
    _, experts = route(torch.zeros(2, 6), 3, True)
    assert experts.tolist() == [[0, 1, 2]] * 2


# --- the op against transformers' blocks -----------------------------------------------------------------------------

SIZES = {"hidden_size": 48, "num_experts_per_tok": 3, "hidden_act": "silu"}
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: MixtralSparseMoeBlock(
        transformers.MixtralConfig(**SIZES, num_local_experts=7, intermediate_size=20)
    ),
    **{
        f"qwen3, norm_topk_prob={norm}": lambda norm=norm: Qwen3MoeSparseMoeBlock(  # type: ignore[misc]
            transformers.Qwen3MoeConfig(**SIZES, num_experts=7, moe_intermediate_size=20, norm_topk_prob=norm)
        )
        for norm in (True, False)
    },
}


def block_and_arguments(name: str, tokens: int, dtype: torch.dtype) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    """One of the blocks, and what the op is given to compute the same."""
    block = BLOCKS[name]()
    randomize(block, 3)
    block.to(dtype)
    x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    logits = torch.nn.functional.linear(x, block.gate.weight).float()
    weights = (block.experts.gate_up_proj, block.experts.down_proj)
    args = [tensor.detach() for tensor in (x, logits, *weights)]
    return block, args, {"top_k": 3, "renormalize": "False" not in name}


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("name", BLOCKS)
def test_op_is_transformers_block(name: str, tokens: int) -> None:
    block, args, options = block_and_arguments(name, tokens, torch.float32)
    with torch.no_grad():
        expected = block(args[0][None])[0]
    for function in (ops.moe.reference, ops.moe.rowwise, ops.moe):
        assert compare(function(*args, **options), expected, torch.float32) is None


@pytest.mark.parametrize("name", BLOCKS)
def test_op_in_bfloat16_is_no_further_from_the_truth_than_transformers_block(name: str) -> None:
    """They round each share and each sum of two, the op its sum once."""
    block, args, options = block_and_arguments(name, 64, torch.bfloat16)
    with torch.no_grad():
        theirs = block(args[0][None])[0]
    exact = ops.moe.reference(*(tensor.double() for tensor in args), **options)
    for function in (ops.moe.reference, ops.moe.rowwise):
        error = (function(*args, **options).double() - exact).abs()
        their_error = (theirs.double() - exact).abs()
        assert 0 < error.mean() <= their_error.mean() and error.max() <= 1.25 * their_error.max()


def test_arguments_that_do_not_fit() -> None:
    program = Program("p", Stage.NORMAL, {"T": Dim("T", 1, 64)})

    def given(name: str, dtype: torch.dtype, *shape: int | str) -> Any:
        return program.add_input(name, TensorType(dtype, shape))

    x, logits, narrow = (
        given("x", torch.bfloat16, "T", 24),
        given("logits", torch.float32, "T", 4),
        given("narrow", torch.bfloat16, "T", 4),
    )
    gate_up, down = given("gate_up", torch.bfloat16, 4, 40, 24), given("down", torch.bfloat16, 4, 24, 20)
    call = ops.moe.overload
    assert str(build.call(program, call, (x, logits, gate_up, down), {"top_k": 4}).meta["type"]) == "bf16[T, 24]"
    for args, top_k, message in [
        ((x, narrow, gate_up, down), 2, "the router's logits are torch.bfloat16"),
        ((x, logits, down, gate_up), 2, "expert weights"),
        ((x, logits, gate_up, down), 5, "top_k is 5"),
        ((x, logits, gate_up, down), 0, "top_k is 0"),
    ]:
        with pytest.raises(VerifyError, match=message):
            build.call(program, call, args, {"top_k": top_k})


# --- a decoder -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoESpec:
    """A mixture of gated parts, each `width` elements wide."""

    width: int
    experts: int
    top_k: int

    def build(self, place: Place, hidden: int, layer: int) -> "MoE":
        return MoE(self, place / "block_sparse_moe", hidden)


class MoE(Block):
    def __init__(self, spec: MoESpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.top_k = spec.top_k
        self.router = Linear(place / "gate", hidden, spec.experts)
        # Experts lie one by one in the checkpoint, and are stacked.
        gate, down, up = (
            [(place / "experts" / expert / part).source("weight") for expert in range(spec.experts)]
            for part in ("w1", "w2", "w3")
        )
        both = recipe.stack([recipe.concat([*pair]) for pair in zip(gate, up, strict=True)])
        self.gate_up = parameter((spec.experts, 2 * spec.width, hidden), both, place.dtype)
        self.down = parameter((spec.experts, hidden, spec.width), recipe.stack(down), place.dtype)

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        logits = ops.cast(self.router(x), dtype=torch.float32)
        return ops.moe(x, logits, self.gate_up, self.down, top_k=self.top_k)


def read(config: ConfigReader) -> DecoderSpec:
    """Mistral with mixtures."""
    experts, top_k = config.integer("num_local_experts"), config.integer("num_experts_per_tok")

    def mixed(branch: BranchSpec) -> BranchSpec:
        if not isinstance(branch.block, GatedSpec):
            return branch
        return replace(branch, block=MoESpec(branch.block.width, experts, top_k))

    decoder: DecoderSpec = changed(mistral(config), BranchSpec, mixed)
    return decoder


MIXTRAL = Architecture("toy", read, DECODER)
PROMPTS = [[7], list(range(3, 20)), [(i * 37) % 211 for i in range(41)]]


@pytest.fixture(scope="module", autouse=True)
def mixtral() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ARCHITECTURES, "MixtralForCausalLM", MIXTRAL)  # type: ignore[arg-type]  # a dict
        yield


@dataclass(frozen=True)
class Theirs:
    folder: Path
    model: Any

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Theirs:
    """Transformers' Mixtral with two layers, and its checkpoint."""
    config = transformers.MixtralConfig(
        hidden_size=60, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, head_dim=10,
        intermediate_size=44, vocab_size=211, num_local_experts=5, num_experts_per_tok=2, max_position_embeddings=160,
        rms_norm_eps=0.01, sliding_window=None, rope_theta=503.0, dtype="float32",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    randomize(model, 11)
    folder = tmp_path_factory.mktemp("mixtral") / "checkpoint"
    model.save_pretrained(folder)
    return Theirs(folder, model)


def test_traced_and_interpreted_it_is_transformers_model(theirs: Theirs) -> None:
    opened = Checkpoint.open(theirs.folder)
    program = trace(read_spec(opened.config), Limits(**LIMITS)).entries["main"]
    calls = list(program.calls(ops.moe.overload))
    assert len(calls) == 2
    for call in calls:
        logits = call.args[1]
        assert logits.target is ops.cast.overload and logits.kwargs == {"dtype": torch.float32}  # type: ignore[union-attr]
    shapes = {name: spec.type.shape for name, spec in program.params.items() if name.startswith("layers.1.mlp.")}
    assert shapes == {
        "layers.1.mlp.router.weight": (5, 60),
        "layers.1.mlp.gate_up": (5, 88, 60),
        "layers.1.mlp.down": (5, 60, 44),
    }
    run = InterpreterRun(program, load_params(program.params, opened.read))
    for rows, prompt in zip(teacher_forced(program.input_types(), run, PROMPTS), PROMPTS, strict=True):
        assert compare(rows, theirs.logits(prompt), torch.float32, factor=DEPTH_FACTOR) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_served_it_is_transformers_model(theirs: Theirs, tmp_path: Path, deterministic: bool) -> None:
    folder = tmp_path / "moe.ingot"
    compile_model(theirs.folder, folder, backend="reference", deterministic=deterministic, **LIMITS)
    final = parse_program((folder / "program.ir").read_text())
    for call in final.calls(ops.moe.overload):
        assert call.args[1].target is ops.cast.overload, "the router's cast is pinned"
    loaded = load_artifact(folder, num_pages=32)

    def run(inputs: Any) -> dict[str, torch.Tensor]:
        return loaded.executor.launch(inputs).outputs

    found = {}
    for chunk in (None, 7):
        found[chunk] = teacher_forced(loaded.executor.inputs, run, PROMPTS, chunk=chunk, pages=32, seed=2)
        for rows, prompt in zip(found[chunk], PROMPTS, strict=True):
            assert compare(rows, theirs.logits(prompt), torch.float32, factor=DEPTH_FACTOR) is None
    if deterministic:
        assert all(map(torch.equal, found[None], found[7])), "an expert's result depends on who else it serves"
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for output in LLM(folder, num_kv_pages=32).generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params):
        assert output.prompt_token_ids is not None
        prompt, tokens = list(output.prompt_token_ids), output.outputs[0].token_ids
        assert tokens == theirs.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :].argmax(-1).tolist()


def test_an_expert_of_another_shape_is_refused_before_anything_is_compiled(theirs: Theirs, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(theirs.folder / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"] = torch.zeros(60, 43)
    source = tmp_path / "checkpoint"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes((theirs.folder / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"experts\.3\.w2\.weight"):
        compile_model(source, tmp_path / "out.ingot", backend="reference", **LIMITS)

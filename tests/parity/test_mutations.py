"""Every field of a decoder's specs shows: without it log-probabilities move by 100 times what parity allows.

Each mutation changes what is traced from a checkpoint (or a table made for it) and runs through the interpreter.
`test_transformers.py` shows that the unchanged program agrees with transformers, so it would catch each of these.
"""

import functools
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_mutations import MUTATIONS, NAMES, PARTS, ROUNDING, SIZES, STORAGE, first_attention
from families import FAMILIES
from mutations import Change, Mutation, every
from run_seed import again, run_seed
from specs import specs
from tiny import TINY

from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.frontend.trace import Limits, trace
from ingot.ir.errors import CheckpointError, ConfigError, IngotError
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.program import ModelSpec
from ingot.models.architectures import ARCHITECTURES, read_spec
from ingot.models.blocks.attention import AttentionNames, AttentionSpec
from ingot.models.blocks.decoder import DecoderSpec
from ingot.models.blocks.feed_forward import GatedSpec
from ingot.models.blocks.head import HeadSpec
from ingot.models.blocks.layer import BranchSpec
from ingot.models.config import RopeSpec

# One worker, for the traces that tests share.
pytestmark = [pytest.mark.xdist_group("mutations"), pytest.mark.one_in_file(3)]

# Which checkpoint is mutated where one is enough: the first one that has what is mutated. The commit draws the order.
ORDER = random.Random(run_seed()).sample([*TINY], len(TINY))


@functools.cache
def _spec(folder: Path) -> ModelSpec:
    return read_spec(json.loads((folder / "config.json").read_text()))


def _logprobs(folder: Path, name: str, mutation: Mutation | None = None) -> list[torch.Tensor]:
    opened = Checkpoint.open(folder)
    spec = read_spec(opened.config)
    if mutation is not None:
        spec = replace(spec, dims=mutation.spec(spec.dims))
    max_seq_len = TINY[name].max_seq_len
    program = trace(spec, Limits(max_seq_len, 8, 1024)).entries["main"]

    params = load_params(program.params, opened.read)
    if mutation is not None:
        mutation.params(params, spec.dims)
    logits = teacher_forced(program.input_types(), InterpreterRun(program, params), TINY[name].prompts())
    return [rows.double().log_softmax(-1) for rows in logits]


@pytest.fixture(scope="session")
def plain(checkpoint: Callable[[str], Path]) -> Callable[[str], list[torch.Tensor]]:
    """Log-probabilities of the unchanged program by the checkpoint's name."""
    return functools.cache(lambda name: _logprobs(checkpoint(name), name))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "all"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_mutation_moves_logprobs(
    mutation: Mutation,
    everywhere: bool,
    checkpoint: Callable[[str], Path],
    plain: Callable[[str], list[torch.Tensor]],
) -> None:
    """In one of the checkpoints that have what is mutated, or in all of them."""
    applies = (name for name in ORDER if mutation.applies(_spec(checkpoint(name)).dims) and name not in mutation.unless)
    names = list(applies if everywhere else itertools.islice(applies, 1))
    assert names, "no checkpoint has what is mutated"
    moved: dict[str, float] = {}
    for name in names:
        mutated = _logprobs(checkpoint(name), name, mutation)
        changes = [(one - other).abs().max() for one, other in zip(plain(name), mutated, strict=True)]
        moved[name] = float(torch.stack(changes).max())
        assert moved[name] < float("inf"), "not a number"
    print(f"{mutation.name}:", ", ".join(f"{name} {value:.3g}" for name, value in moved.items()))
    assert min(moved.values()) >= mutation.moved, again(moved)


@pytest.mark.parametrize("name", ["llama-scaled", "qwen3-biased"])
def test_without_a_mutation_nothing_moves(
    name: str, checkpoint: Callable[[str], Path], plain: Callable[[str], list[torch.Tensor]]
) -> None:
    """What moves above is the mutation, not the copy that it is made in."""
    again = _logprobs(checkpoint(name), name, Mutation("nothing", "", lambda dims: True))
    assert all(torch.equal(one, other) for one, other in zip(plain(name), again, strict=True))


def test_every_field_has_a_mutation(checkpoint: Callable[[str], Path]) -> None:
    mutated = {mutation.field for mutation in MUTATIONS} | {*SIZES, *STORAGE, *ROUNDING, *PARTS}
    needed = set()
    for name in TINY:
        for spec in specs(_spec(checkpoint(name)).dims):
            if isinstance(spec, RopeSpec):
                needed |= {f"RopeSpec.constants.{constant}" for constant, _ in spec.constants}
            if not isinstance(spec, NAMES):
                needed |= {f"{type(spec).__name__}.{field.name}" for field in fields(spec)}  # type: ignore[arg-type]
    assert needed - {"RopeSpec.constants"} == mutated


def test_every_architecture_has_a_checkpoint() -> None:
    aliases = {name for family in FAMILIES.values() for name in family.aliases}
    assert {tiny.config["architectures"][0] for tiny in TINY.values()} == ARCHITECTURES.keys() - aliases


FLAGS: dict[str, Callable[[DecoderSpec], bool]] = {
    "tied": lambda dims: dims.head.tied,
    "bias": lambda dims: first_attention(dims).bias,
    "o_bias": lambda dims: first_attention(dims).o_bias,
    "mlp_bias": lambda dims: next(specs(dims, GatedSpec)).bias,
}


def test_every_flag_is_both_on_and_off(checkpoint: Callable[[str], Path]) -> None:
    """Within three checkpoints of the first two families, as far as the family has the flag."""
    for family, flags in (("llama", tuple(FLAGS)), ("qwen3", ("tied", "bias", "o_bias"))):
        found = [_spec(checkpoint(f"{family}-{kind}")).dims for kind in ("plain", "biased", "scaled")]
        for flag in flags:
            assert set(map(FLAGS[flag], found)) == {True, False}, (family, flag)
        assert {first_attention(dims).heads // first_attention(dims).kv_heads for dims in found} == {1, 2, 3}
        assert {dims.ropes[0].rope_type for dims in found} == {"default", "linear", "llama3"}


def _with_dims(request: Request, change: Change) -> Request:
    return replace(request, spec=replace(request.spec, dims=change(request.spec.dims)))


def test_weights_stored_apart_are_missed(checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint("phi3-short"), backend="reference")
    with pytest.raises(CheckpointError, match="missing"):
        _with_dims(request, every(AttentionSpec, names=AttentionNames())).trace()


@pytest.fixture(scope="session")
def requested(checkpoint: Callable[[str], Path]) -> Callable[[str], Request]:
    """The request to compile a checkpoint, by the checkpoint's name."""
    return functools.cache(lambda name: Request.read(checkpoint(name), backend="reference"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("size", SIZES)
def test_a_wrong_size_is_refused(size: str, requested: Callable[[str], Request]) -> None:
    """In three of the checkpoints that have it."""
    both = ((request, _with_dims(request, SIZES[size])) for request in map(requested, ORDER))
    wrong = [*itertools.islice((wrong for request, wrong in both if wrong.spec != request.spec), 3)]
    assert wrong, "no checkpoint has it"
    for one in wrong:
        with pytest.raises((CheckpointError, ConfigError), match=r"do not fit|experts in \d+ groups"):
            one.trace()


@pytest.mark.parametrize("name", ["llama-biased", "qwen3-plain"])
def test_a_head_that_is_not_tied_is_missed(name: str, checkpoint: Callable[[str], Path]) -> None:
    request = Request.read(checkpoint(name), backend="reference")
    with pytest.raises(IngotError, match=r"lm_head\.weight"):
        _with_dims(request, every(HeadSpec, tied=False)).trace()


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (AttentionSpec, "bias", False),
        (AttentionSpec, "o_bias", False),
        (GatedSpec, "bias", False),
        (AttentionSpec, "qk_norm", None),
        (BranchSpec, "post_norm", None),
    ],
)
def test_tensors_of_a_flag_left_out_are_extra(
    kind: type[Any], field: str, value: Any, checkpoint: Callable[[str], Path]
) -> None:
    for name in ("llama-biased", "qwen3-biased", "gemma2-capped"):
        request = Request.read(checkpoint(name), backend="reference")
        without = _with_dims(request, every(kind, **{field: value}))
        if without.spec != request.spec:
            with pytest.raises(CheckpointError, match="extra"):
                without.trace()

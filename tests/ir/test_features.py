"""Features and endings: what is declared once holds wherever it is used, and what cannot be is said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.ir.errors import IngotError, InternalError, ParseError, VerifyError
from ingot.ir.features import (
    ENDINGS,
    FEATURES,
    Ending,
    EndingUse,
    Feature,
    FedSequence,
    StepInput,
    fed_of,
    find_ending,
    find_feature,
    find_input,
    register_ending,
    register_feature,
    row_tables,
    step_inputs,
    step_values,
)
from ingot.ir.features.registry import forget_feature
from ingot.ir.parse import parse_ending, parse_program
from ingot.ir.text import print_program
from ingot.ir.types import Size, TensorType
from ingot.runtime.cuda.graphs.staging import PaddedInputs
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes, filled

PAGE = 4
TWO = [FedSequence(2, [5, 6, 7], 0, 0, [3]), FedSequence(0, [-1], 4, -1, [1, 2])]
USES = ["sample", "verify(drafted=3)", "verify(drafted=3, hidden)", "propose(hidden)"]
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


@pytest.fixture
def colour() -> Iterator[Feature]:
    """A feature that only this test has, with an input for each row of logits."""
    shade = StepInput("shade", TensorType(torch.int32, ("L",)), -5, lambda array, fed: array.fill(9))
    yield register_feature(Feature("colour", (shade,)))
    forget_feature("colour")


# --- the text of an ending ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", USES)
def test_an_ending_is_read_as_it_is_printed(text: str) -> None:
    assert str(parse_ending(text)) == text
    program = parse_program(f"program p stage=CACHED\nending {text}\ninput x: f32[2]\nreturn x=%x\n")
    assert program.ending == parse_ending(text)
    assert print_program(program).splitlines()[1:2] == ([f"ending {text}"] if text != "sample" else ["input x: f32[2]"])
    assert parse_program(print_program(program)).ending == program.copy().ending == program.ending


@settings(deadline=None)
@given(NAMES, st.dictionaries(NAMES, st.integers(0, 10**6), max_size=3), st.lists(NAMES, max_size=3))
def test_any_ending_is_read_as_it_is_printed(name: str, attributes: dict[str, int], features: list[str]) -> None:
    use = EndingUse(name, tuple(attributes.items()), tuple(features))
    assert parse_ending(str(use)) == use


@pytest.mark.parametrize(
    "text",
    [
        "verify(=3)",
        "verify(drafted=²)",
        "",
        "sample(",
        "sample)",
        "sample(a=)",
        "sample(a=-1)",
        "sample(a=1=2)",
    ],
)
def test_an_ending_that_does_not_read(text: str) -> None:
    with pytest.raises(ParseError, match="line 1, column"):
        parse_ending(text)
    with pytest.raises(ParseError, match="line 2, column"):
        parse_program(f"program p stage=CACHED\nending {text}\ninput x: f32[2]\nreturn x=%x\n")


@settings(deadline=None)
@given(st.text(max_size=12) | st.text(max_size=6).map("sample(a={})".format))
def test_any_text_is_an_ending_or_refused(text: str) -> None:
    try:
        use = parse_ending(text)
    except ParseError:
        return
    assert parse_ending(str(use)) == use


def test_tokens_that_an_ending_feeds() -> None:
    def fed(text: str) -> int:
        use = parse_ending(text)
        return find_ending(use.name).fed(use)

    assert (fed("sample"), fed("propose"), fed("verify"), fed("verify(drafted=3)")) == (1, 1, 2, 4)


def test_an_output_of_a_width_that_is_the_models_own() -> None:
    (vectors,) = find_ending("pool").outputs
    shapes: tuple[tuple[Size, ...], ...] = (("B", 64), ("B", 1), ("T", 64), ("B",), ("B", 64, 2))
    assert [vectors.fits(TensorType(torch.float32, shape)) for shape in shapes] == [True, True, False, False, False]
    assert not vectors.fits(TensorType(torch.bfloat16, ("B", 64)))
    tokens = find_ending("sample").outputs[0]
    assert tokens.fits(tokens.type) and not tokens.fits(TensorType(torch.int32, ("B",)))


# --- what is declared -----------------------------------------------------------------------------------------------


def test_what_is_unknown_or_there_twice(colour: Feature) -> None:
    with pytest.raises(VerifyError, match="unknown feature 'shape'"):
        find_feature("shape")
    with pytest.raises(VerifyError, match="unknown ending 'rank'"):
        find_ending("rank")
    assert find_input("shade") is colour.inputs[0] and find_input("hue") is None
    shade = colour.inputs[0]
    scalar = replace(shade, name="hue", type=TensorType(torch.int32, (4,)))
    wide = replace(shade, name="hue", type=TensorType(torch.int64, ("L",)), late=True)
    for feature, said in (
        (colour, "'colour' is defined twice"),
        (Feature("paint", (shade,)), "'shade' is declared twice"),
        (Feature("paint", (scalar,)), "T, B, L or G as the first axis"),
        (Feature("paint", (wide,)), "elements of 4 bytes"),
    ):
        with pytest.raises(InternalError, match=said):
            register_feature(feature)
    assert "paint" not in FEATURES and find_input("hue") is None
    for ending, said in (
        (ENDINGS["sample"], "'sample' is defined twice"),
        (Ending("rank", (), ("shape",), ()), "the unknown feature 'shape'"),
    ):
        with pytest.raises(InternalError, match=said):
            register_ending(ending)
    assert "rank" not in ENDINGS


def test_every_ending_asks_for_what_is_declared() -> None:
    for ending in ENDINGS.values():
        assert all(name in FEATURES for name in ending.features)
        assert set(ending.read) <= {one.name for one in ending.outputs}


# --- the inputs of a step -------------------------------------------------------------------------------------------


def test_every_input_is_padded_as_it_is_declared(colour: Feature) -> None:
    """Of a step that is filled up: what its sequences have in front, and padding behind, also where a larger step
    was."""
    names = frozenset(name for name, one in step_inputs().items() if one.known)
    layout, sizes = StepLayout.of(names), StepSizes(6, 4, 5, 3, G=4)
    given = PaddedInputs(layout, sizes)
    larger = fed_of([FedSequence(row, [9], 5, -1, [1, 2, 3], params={"top_k": 7}) for row in range(4)], PAGE)
    given.fill(filled(layout, larger, StepSizes(4, 4, 4, 3)))
    step = filled(layout, fed_of(TWO, PAGE), StepSizes(4, 2, 2, 2))
    given.fill(step)
    found = layout.views(given.memory, sizes)
    assert found.keys() == names
    for name, value in found.items():
        declared, real = find_input(name), step[name]
        assert declared is not None
        own = value[: len(real)] if value.dim() == 1 else value[: len(real), : real.shape[1]]
        assert torch.equal(own, real), name
        assert len(value) > len(real) and (value[len(real) :] == declared.padding).all(), name
    # And a sequence that asks for nothing has what padding has.
    for table in row_tables(names):
        one = find_input(table.name)
        if one is not None:
            assert table.nothing == one.padding and (step[table.name] == one.padding).all()


def test_a_step_has_the_inputs_of_its_plan_alone(colour: Feature) -> None:
    penalties = {one.name for one in FEATURES["penalties"].inputs}
    usual = StepLayout.usual()
    assert {"shade", *penalties} <= {*usual.names} and "positions" not in usual.names
    layout = StepLayout.of(frozenset(usual.names) - penalties - {"shade"})
    assert not {"shade", *penalties} & {*layout.names} and not penalties & {table.name for table in layout.tables}
    sizes = StepSizes(3, 2, 2, 2)
    assert layout.words(sizes) == usual.words(sizes) - 2 - 4 * 2 - 2  # prompt_ends; by row of logits; shade
    step = filled(layout, fed_of(TWO[1:], PAGE), StepSizes(1, 1, 1, 2))
    assert isinstance(step, StepInputs) and tuple(step) == layout.names
    with pytest.raises(InternalError, match="no feature declares the step input 'hue'"):
        StepLayout.of(frozenset({"tokens", "hue"}))
    with pytest.raises(IngotError, match="no feature declares the step input 'hue'"):
        step_values(["hue"], fed_of(TWO, PAGE))


def test_steps_by_hand() -> None:
    got = {name: value.tolist() for name, value in step_values(step_inputs(), fed_of(TWO, PAGE)).items()}
    assert got["tokens"] == [5, 6, 7, -1] and got["token_seqs"] == [0, 0, 0, 1] and got["rows"] == [2, 0]
    assert got["positions"] == [0, 1, 2, 4] and got["starts"] == [0, -1] and got["kv_lens"] == [3, 5]
    assert got["slots"] == [12, 13, 14, 8] and got["page_table"] == [[3, 0], [1, 2]]
    assert got["logit_rows"] == [2, 3] and got["sample_index"] == [0, 1]
    assert got["state_read"] == [-1, 0] and got["state_write"] == [2, 0]
    scored = fed_of([replace(TWO[0], rows=3, samples=False, prompt_logprobs=(8, 2)), TWO[1]], PAGE)
    got = {name: value.tolist() for name, value in step_values(step_inputs(), scored).items()}
    assert got["sample_index"] == [-1, 3] and got["logit_rows"] == [0, 1, 2, 3]
    assert got["targets"] == [8, 8, 8, -1] and got["num_logprobs"] == [2, 2, 2, -1]

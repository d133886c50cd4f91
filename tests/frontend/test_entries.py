"""Entries that cannot be traced: the message names the definition, the entry, and where its module is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from changed_definition import change_definition
from staged import traced
from tiny import TINY
from torch import nn

from ingot.compile.merged_plans import merged_plans
from ingot.ir import ops, recipe
from ingot.ir.errors import ConfigError, IngotError, InternalError, VerifyError
from ingot.ir.features import EndingUse
from ingot.ir.program import Program, Stage, StateSpec
from ingot.ir.types import TensorType
from ingot.models.architectures import INPUTS, Entry
from ingot.models.params import parameter
from ingot.passes.manager import Lowered

CONFIG = TINY["llama-plain"].config
BY_ROW = {"last_tokens": TensorType(torch.int32, ("B",))}


class Guess(nn.Module):
    """Looks up a row for the last token of each sequence, in a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = parameter((CONFIG["vocab_size"], 2), recipe.source("draft:table"), torch.float32)

    def forward(self, last_tokens: torch.Tensor) -> torch.Tensor:
        return ops.embedding(last_tokens, self.table)


class Undeclared(Guess):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(CONFIG["vocab_size"], 2))


def guess(made: type[nn.Module] = Guess, **changes: Any) -> Callable[[Any, nn.Module], dict[str, Entry]]:
    def entries(spec: Any, module: nn.Module) -> dict[str, Entry]:
        fields: dict[str, Any] = {
            "inputs": BY_ROW,
            "outputs": ("proposed",),
            "ending": EndingUse("propose"),
        }
        return {"guess": Entry(made(), **{**fields, **changes})}

    return entries


def trace_with(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    change_definition(monkeypatch, "LlamaForCausalLM", **changes)
    return traced(CONFIG)


def test_an_entry_with_inputs_outputs_and_weights_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trace_with(monkeypatch, more_entries=guess(), round=("main", "guess"))
    program = model.entries["guess"]
    assert program.input_types() == BY_ROW and list(program.output_nodes()) == ["proposed"]
    assert program.ending == EndingUse("propose") and program.dims.keys() == {"B"}
    (name,) = program.params
    assert name == "guess.table" and program.params[name].recipe.sources() == {"draft:table"}
    assert name not in model.entries["main"].params and model.entries["main"].ending == EndingUse()


WIDE = {"last_tokens": TensorType(torch.int32, ("B", 2))}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an input that nothing fills": (
        {"inputs": {"hue": TensorType(torch.int32, ("B",))}},
        "nothing fills the input 'hue'.*step inputs: tokens",
    ),
    "an input that the ending does not fill": (
        {"ending": EndingUse("sample"), "outputs": ("logits",)},
        "nothing fills the input 'last_tokens'",
    ),
    "an input of another type": (
        {"inputs": {"tokens": TensorType(torch.int64, ("T",))}},
        r"the input 'tokens' is i64\[T\].*i32\[T\], as declared",
    ),
    "an ending without its output": (
        {"outputs": ("guessed",)},
        "the ending 'propose' needs the output 'proposed'.*it returns guessed",
    ),
    "an unknown ending": ({"ending": EndingUse("rank")}, "unknown ending 'rank'"),
    "an unknown feature": ({"ending": EndingUse("propose", (), ("hue",))}, "unknown feature 'hue'"),
    "a parameter without a recipe": (
        {"made": Undeclared},
        r"the parameter 'table' has no recipe.*ingot\.models\.params\.parameter",
    ),
    "fewer outputs than are declared": (
        {"outputs": ("proposed", "hidden")},
        "the module returns 1 tensors, and 2 outputs are declared.*one for each of proposed, hidden",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_entry_that_cannot_be_traced(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, said = REFUSED[case]
    with pytest.raises(ConfigError, match=f"(?s){said}") as caught:
        trace_with(monkeypatch, more_entries=guess(**changes))
    line = inspect.getsourcelines(changes.get("made", Guess))[1]
    assert caught.value.where == f"definition llama, entry guess, {__file__}:{line}"


def test_main_is_checked_as_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(spec: Any, module: nn.Module) -> dict[str, Entry]:
        return {"main": Entry(module, outputs=("logits", "hidden"))}

    with pytest.raises(ConfigError, match="the module returns 1 tensors, and 2 outputs") as caught:
        trace_with(monkeypatch, more_entries=entries)
    assert "entry main" in caught.value.where and "blocks/decoder.py:" in caught.value.where


def test_a_round_of_unknown_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InternalError, match="unknown entry 'guess'"):
        trace_with(monkeypatch, round=("main", "guess"))


def test_what_every_decoder_takes_is_declared() -> None:
    from ingot.ir.features import find_input

    for name, value_type in INPUTS.items():
        declared = find_input(name)
        assert declared is not None and declared.type == value_type


def test_two_entries_mean_one_state_by_one_name() -> None:
    def entry(name: str, dtype: torch.dtype) -> Lowered:
        program = Program(name, Stage.CACHED, {})
        program.add_state("kept", StateSpec("row", "rows", "sequence", TensorType(dtype, (4,))))
        return Lowered(program, {})

    with pytest.raises(VerifyError, match=r"the state 'kept' is i64\[4\] \(row, group rows\)") as caught:
        merged_plans({"main": entry("main", torch.int32), "draft": entry("draft", torch.int64)})
    assert caught.value.where.startswith("entry draft") and "i32[4]" in caught.value.expected
    assert "as in the entry main" in caught.value.expected and isinstance(caught.value, IngotError)

"""insert-adapters, with the factors that the runtime writes: logits are those of weights merged by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_folder import adapter_for, merged_by_hand
from staged import interpreted, pass_context
from tiny import CHECKPOINTS, compile_options

from ingot.compile.request import Request
from ingot.ir import ops
from ingot.ir.adapters.sites import adapter_sites
from ingot.ir.artifact.adapters import ADAPTED
from ingot.ir.errors import OptionError
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.ir.parse import parse_recipe
from ingot.ir.program import Program, Stage
from ingot.passes.manager import run_pipeline
from ingot.runtime.adapters.host_adapter import Places, host_adapter

TOLERANCE = 1e-4  # of a logit, as for parity with transformers


def request(folder: Path, name: str, **options: Any) -> Request:
    limits = {key: value for key, value in compile_options(name).items() if key != "jobs"}
    return Request.read(folder, backend="reference", **{**limits, "max_loras": 3, "max_lora_rank": 8, **options})


def adapted(asked: Request) -> Program:
    context = pass_context(asked.limits, bucket=None)
    return run_pipeline(asked.trace(), context, (), asked.pipeline(), entry=ADAPTED, upto=Stage.FUSED).fused


def places_of(program: Program, asked: Request) -> Places:
    sites = adapter_sites(program, {name: info.shape for name, info in asked.checkpoint.tensors.items()})
    linears = tuple((one, tuple(parse_recipe(part.recipe) for part in one.segments)) for one in sites.linears)
    types = {name: spec.type for name, spec in program.states.items() if spec.kind == "lora"}
    return Places(linears, types)


def with_slots(run: InterpreterRun, slots: list[int]) -> Callable[[Mapping[str, torch.Tensor]], Any]:
    """The program, with the slot of each request: request i has device row i."""

    def step(inputs: Mapping[str, torch.Tensor]) -> Any:
        rows = inputs["rows"][inputs["token_seqs"].long()]
        return run({**inputs, "adapter_slots": torch.tensor(slots, dtype=torch.int32)[rows.long()]})

    return step


# q, k and v apart; as one tensor; [in, out]; interleaved heads; parallel branches; tied and scaled logits.
FAMILIES = (
    "llama-plain",
    "phi3-long",
    "gpt2-tied",
    "gpt_neox-parallel",
    "falcon-new",
    "gemma2-capped",
    "cohere-normed",
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_merged_weights(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base = checkpoint(name)
    asked = request(base, name)
    program = adapted(asked)
    places = places_of(program, asked)
    assert places.num_slots == 3 and places.rank == 8
    run = InterpreterRun(program, load_params(program.params, asked.checkpoint.read))
    folders = [adapter_for(base, tmp_path / f"{i}", rank=rank, seed=i) for i, rank in enumerate((3, 8))]
    for slot, folder in ((0, folders[0]), (2, folders[1])):
        for state, tensor in places.split(host_adapter("a", folder, places).factors).items():
            run.states[state][slot] = tensor
    prompts = CHECKPOINTS[name].prompts()[3:6]
    found = teacher_forced(program.input_types(), with_slots(run, [2, -1, 0]), prompts, chunk=11)
    merged = [merged_by_hand(base, folder, tmp_path / f"merged-{i}") for i, folder in enumerate(folders)]
    limits = {key: value for key, value in compile_options(name).items() if key != "jobs"}
    for logits, folder, prompt in zip(found, (merged[1], base, merged[0]), prompts, strict=True):
        plain = interpreted(folder, **limits)
        (wanted,) = teacher_forced(plain.program.input_types(), plain, [prompt])
        assert (logits - wanted).abs().max() <= TOLERANCE * max(1.0, float(wanted.abs().max()))


def test_merged_linears_have_one_shrink_and_one_expand(checkpoint: Callable[[str], Path]) -> None:
    program = adapted(request(checkpoint("llama-plain"), "llama-plain"))
    linears = len(list(program.calls(ops.linear.overload)))
    expands = list(program.calls(ops.lora_expand.overload))
    assert (
        len(expands) == len(list(program.calls(ops.lora_shrink.overload))) in (linears, linears - 1)
    )  # of a tied head
    assert [len(node.kwargs["segments"]) for node in expands[:4]] == [3, 1, 2, 1]  # q k v, o, gate and up, down


def test_a_tied_head_has_no_adapter(checkpoint: Callable[[str], Path]) -> None:
    asked = request(checkpoint("gemma-tied"), "gemma-tied")
    tensors = {part.tensor for one, _ in places_of(adapted(asked), asked).linears for part in one.segments}
    assert tensors and not any("embed_tokens" in name for name in tensors)


def test_the_entry_main_stays_as_it_is(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama-plain")
    with_adapters, without = request(folder, "llama-plain"), request(folder, "llama-plain", max_loras=0)
    assert not without.trace().entries["main"].diff(with_adapters.trace().entries["main"])
    assert without.trace().entries.keys() == {"main"}


@pytest.mark.parametrize("options", [{"max_loras": -1}, {"max_loras": True}, {"max_lora_rank": 0}, {"mesh": {"tp": 2}}])
def test_bad_options_are_refused(options: dict[str, Any], checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(OptionError):
        request(checkpoint("llama-plain"), "llama-plain", **options)

"""Where programs come apart, whatever lies between: fused, regions, ranks; and where one overflows."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from sharded import CASES
from staged import staged
from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.numerics.contracts import RankParams
from ingot.ir.numerics.divergence import Divergence, by_contract, first_divergence, first_nonfinite
from ingot.ir.numerics.harness import rank_params, step_inputs
from ingot.ir.numerics.recording import Recording, record
from ingot.ir.program import Program, RegionCall
from ingot.ir.text import print_program
from ingot.passes.pipeline import pipeline_for

# Three layers: the first two run one region, with weights of their own.
CASE = replace(CASES["key-value groups"], changes={**CASES["key-value groups"].changes, "num_hidden_layers": 3})
REQUESTS = [list(range(5, 25)), [7]]


class World:
    """A model after every pass, on one device and on a mesh, and recordings of its programs."""

    def __init__(self, folder: object) -> None:
        model, self.read = CASE.open(folder)
        self.alone = {step.name: step.program for step in staged(model)[0]}
        self.on_mesh = {step.name: step.program for step in staged(model, pipeline_for(CASE.mesh), mesh=CASE.mesh)[0]}
        self.recorded = cache(self._recorded)

    def _recorded(self, name: str, mesh: bool = False) -> Recording:
        return self.record((self.on_mesh if mesh else self.alone)[name])

    def params(self, program: Program) -> RankParams:
        return rank_params(program, self.read)

    def record(self, program: Program) -> Recording:
        inputs = step_inputs(program.input_types(), REQUESTS, seed=3)
        assert len(inputs) == 1
        return record(program, self.params(program), inputs)

    def broken(self, name: str, edit: Callable[[Program], None], since: str) -> Divergence | None:
        program = self.alone[name].copy()
        edit(program)
        return first_divergence(self.recorded(since), self.record(program))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("divergence"))


def test_healthy_programs_agree_from_any_stage_to_any_other(world: World) -> None:
    first, last = world.recorded("trace"), world.recorded("make-plan")
    programs = [*world.alone.values(), *world.on_mesh.values()]
    distinct = {print_program(program).partition("\n")[2]: program for program in programs}
    assert len(distinct) > 10
    for program in distinct.values():
        one = world.record(program)
        assert first_divergence(first, one) is None
        assert first_divergence(one, last) is None


def test_ranks_are_put_together(world: World) -> None:
    """Split along rows, owed as a sum, cut into the segments of a merged product: all as on one device."""
    (alone,), (ranks,) = world.recorded("fuse-add-rms-norm").steps, world.recorded("fuse-add-rms-norm", mesh=True).steps
    shapes = {name: value.measured.found.shape for name, value in alone.items()}
    shared = [name for name in alone if name in ranks and ranks[name].op == alone[name].op]
    assert len(shared) > 10 and all(ranks[name].measured.found.shape == shapes[name] for name in shared)


def _nth(op: ops.Op, index: int) -> Callable[[Program], fx.Node]:
    return lambda program: list(program.calls(op.overload))[index]


def _swap(program: Program) -> None:
    node = _nth(ops.silu_mul, 1)(program)
    node.args = (node.args[1], node.args[0])


def _eps(program: Program) -> None:
    node = _nth(ops.add_rms_norm, 2)(program)
    node.kwargs = {**node.kwargs, "eps": 0.5}


def _scale(program: Program) -> None:
    node = _nth(ops.paged_attention, 1)(program)
    node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * 1.5}


CASES_OF_FAULTS: Mapping[str, tuple[str, Callable[[Program], None], str, str, int | None]] = {
    "in one pass": ("merge-linears", _swap, "insert-ending", "silu_mul_1", 1),
    "since the beginning": ("merge-linears", _swap, "trace", "silu_mul_1", 1),
    "in a fused op": ("fuse-add-rms-norm", _eps, "merge-linears", "linear_25", 1),
    "in a call that stayed": ("make-plan", _scale, "choose-backends", "paged_attention_1", 1),
}


@pytest.mark.parametrize("name", CASES_OF_FAULTS)
def test_the_first_tensor_is_named(name: str, world: World) -> None:
    stage, edit, since, node, layer = CASES_OF_FAULTS[name]
    found = world.broken(stage, edit, since)
    assert found is not None and (found.node, found.layer, found.step) == (node, layer, 0)
    assert found.before.shape == found.after.shape and found.before.rms != found.after.rms
    assert "the meaning changed" in str(found) and f"layer {layer}" in str(found)


def test_what_made_it_is_named(world: World) -> None:
    found = world.broken("fuse-add-rms-norm", _eps, "merge-linears")
    assert found is not None and found.made == ("item_13", "add_rms_norm_2")


def test_in_the_body_of_a_region_that_several_layers_run(world: World) -> None:
    """The first of its calls is the first wrong one."""
    program = world.alone["make-plan"].copy()
    call = next(node for node in program.calls(RegionCall("r1")))
    region = program.regions["r1"]
    body = region.body.copy()
    (gated,) = body.calls(ops.silu_mul.overload)
    gated.args = (gated.args[1], gated.args[0])
    program.regions["r1"] = replace(region, body=body)
    found = first_divergence(world.recorded("choose-backends"), world.record(program))
    assert found is not None and found.node == f"{call.name}/{gated.name}" and found.op == "ingot.silu_mul"
    assert found.layer == 0


@pytest.mark.parametrize("seed", range(24))
def test_wrong_wiring_is_found_anywhere(seed: int, world: World) -> None:
    """A call of the program or of a region's body, drawn at random, reads another value of the same type: it is the
    node, or made it, or feeds what did."""
    draw = random.Random(seed)
    names = list(world.alone)
    stage = draw.choice(names[1:])
    program = world.alone[stage].copy()
    body = program
    if program.regions and draw.random() < 0.7:
        region = program.regions[draw.choice(list(program.regions))]
        body = region.body.copy()
        program.regions[region.name] = replace(region, body=body)
    node, old, new = draw.choice(list(_rewirings(body)))
    node.args = tuple(new if argument is old else argument for argument in node.args)
    changed = world.record(program)
    found = first_divergence(world.recorded(names[names.index(stage) - 1]), changed)
    if found is None:
        assert first_divergence(world.recorded(stage), changed) is None, f"{node.format_node()} makes no difference"
    else:
        # Where a call of a region reads something wrong, its body is where that shows.
        suspects = {part for name in (found.node, *found.made, *found.fed) for part in name.split("/")}
        assert node.name in suspects, f"{node.format_node()} reads {new}: {found}"


def _rewirings(program: Program) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Calls, a floating-point argument of theirs, and another value of its type that is there by then."""
    for node in program.calls():
        earlier = list(itertools.takewhile(lambda one, node=node: one is not node, program.graph.nodes))
        for old in node.all_input_nodes:
            dtype = getattr(old.meta["type"], "dtype", torch.int32)
            for new in earlier if dtype.is_floating_point and old in node.args else ():
                if new is not old and new.meta["type"] == old.meta["type"]:
                    yield node, old, new


def test_bits_are_compared_by_contract(world: World) -> None:
    before, after = world.recorded("insert-ending"), world.recorded("merge-linears")
    assert first_divergence(before, after, by_contract(Numerics.ROUNDING, torch.float32)) is None
    assert first_divergence(before, before, by_contract(Numerics.EXACT, torch.float32)) is None
    program = world.alone["insert-ending"].copy()
    node = list(program.calls(ops.linear.overload))[3]
    with program.graph.inserting_after(node):
        narrow = program.graph.call_function(ops.cast.overload, (node,), {"dtype": torch.bfloat16})
    with program.graph.inserting_after(narrow):
        wide = program.graph.call_function(ops.cast.overload, (narrow,), {"dtype": torch.float32})
    narrow.meta["type"] = wide.meta["type"] = node.meta["type"]
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not narrow)
    rounded = world.record(program)
    assert first_divergence(before, rounded) is None, "casts do not change what a program means"
    for numerics in (Numerics.EXACT, Numerics.ROUNDING):
        found = first_divergence(before, rounded, by_contract(numerics, torch.float32))
        assert found is not None and found.made == (wide.name, narrow.name) and found.layer == 0


def test_an_overflow_is_named_where_it_starts(world: World) -> None:
    program = world.alone["make-plan"]
    inputs = step_inputs(program.input_types(), REQUESTS, chunk=8, seed=3)
    (params,) = world.params(program)
    assert len(inputs) > 1 and first_nonfinite(program, [params], inputs) is None
    name = next(name for name in params if name.startswith("layers.1.mlp.gate_up"))
    large = {**params, name: params[name] * 1e22}
    found = first_nonfinite(program, [large], inputs)
    assert found is not None and found.op == "ingot.silu_mul" and found.layer == 1
    assert found.node == "region_r1_1/silu_mul", "the body is named after layer 0, which runs it first"
    assert found.dtype == "f32" and found.largest > found.limit == torch.finfo(torch.float32).max and found.count > 0
    # What is infinite in float64 too did not overflow here.
    assert first_nonfinite(program, [{**params, name: params[name] * float("inf")}], inputs) is None

"""The verifier refuses what text cannot say: programs that are built by hand, and types."""

from collections.abc import Callable

import pytest
import torch
from healthy_programs import HEALTHY, KV, REGION, program, refusal

from ingot.ir.errors import InternalError, VerifyError
from ingot.ir.ops import OPS
from ingot.ir.program import ParamSpec, Program, Region, RegionCall, Stage, StateSpec
from ingot.ir.recipe import source
from ingot.ir.types import Dim, Placement, StateType, TensorType
from ingot.ir.verify import verify


def built() -> Program:
    result = Program("p", Stage.NORMAL, {"T": Dim("T", 1, 8)})
    x = result.add_input("x", TensorType(torch.float32, ("T", 4)))
    weight = result.add_param("w", ParamSpec(TensorType(torch.float32, (4,)), source("w")))
    node = result.graph.call_function(OPS["rms_norm"].overload, (x, weight), {"eps": 1e-5})
    node.meta["type"] = TensorType(torch.float32, ("T", 4))
    result.set_outputs({"y": node})
    verify(result)
    return result


def only_call(program: Program) -> torch.fx.Node:
    return next(iter(program.calls()))


def test_no_output() -> None:
    broken = built()
    broken.graph.erase_node(broken.graph.output_node())
    assert refusal(broken).what in ("the program returns nothing", "nothing uses the result")


def test_malformed_graph() -> None:
    broken = built()
    call = only_call(broken)
    broken.find("x").prepend(call)  # now it stands before what it reads
    assert refusal(broken).what.startswith("the graph is malformed: ")


def test_node_of_another_kind() -> None:
    broken = built()
    with broken.graph.inserting_after(only_call(broken)):
        broken.graph.call_method("relu", (only_call(broken),))
    assert refusal(broken).what == "a node of kind 'call_method'"


def test_node_without_type() -> None:
    broken = built()
    del only_call(broken).meta["type"]
    error = refusal(broken)
    assert error.what == "a node without a type" and error.where.endswith(": %rms_norm_default")


def test_target_without_name() -> None:
    broken = built()
    only_call(broken).target = torch.relu
    with pytest.raises(InternalError, match="which has no name in the IR"):
        verify(broken)


def test_placeholder_without_declaration() -> None:
    broken = built()
    broken.params.clear()
    assert refusal(broken).what == "param 'w' is not declared"


def test_declaration_without_placeholder() -> None:
    broken = built()
    broken.params["v"] = broken.params["w"]
    assert refusal(broken).what == "param 'v' has no placeholder"
    broken = built()
    broken.states["s"] = StateSpec("row", "g", "sequence", TensorType(torch.int32, (3,)))
    assert refusal(broken).what == "state 's' has no placeholder"


def test_param_that_differs_from_its_spec() -> None:
    broken = built()
    broken.params["w"] = ParamSpec(TensorType(torch.float64, (4,)), source("w"))
    error = refusal(broken)
    assert error.what == "the param's type differs from its spec" and error.expected == "f64[4]"


def test_names_that_mean_two_values() -> None:
    """A call may get its name before a placeholder of that name comes: its text would not parse."""
    broken = built()
    broken.add_input("rms_norm_default", TensorType(torch.float32, ("T",)))
    assert refusal(broken).what == "two values are named %rms_norm_default"
    with pytest.raises(VerifyError, match="placeholder 'x' is defined twice"):
        built().add_input("x", TensorType(torch.float32, ("T",)))
    with pytest.raises(VerifyError, match="placeholder 'w' is defined twice"):
        built().add_state("w", StateSpec("row", "g", "sequence", TensorType(torch.int32, (3,))))


def test_outputs_named_twice() -> None:
    broken = built()
    broken.outputs = ("y", "y")
    broken.graph.output_node().args = ((only_call(broken), only_call(broken)),)
    assert refusal(broken).what == "outputs must be named, each once"


def test_regions_within_regions() -> None:
    broken = program("LOWERED", HEALTHY["LOWERED"])
    broken.regions["r"].body.regions["s"] = Region("s", broken.regions["r"].body, "b")
    assert refusal(broken).what == "region 'r' holds states, params or regions of its own"


def test_state_as_an_argument_of_a_region() -> None:
    """A region's inputs are tensors, so no state can be written outside the arguments of its call."""
    broken = program("LOWERED", KV + REGION + "return k=%k, kv=%kv\n")
    with broken.graph.inserting_before(broken.graph.output_node()):
        node = broken.graph.call_function(RegionCall("r"), (broken.find("kv"),))
    node.meta.update(type=StateType("kv"), backend="b")
    broken.set_outputs({"kv": node})
    assert refusal(broken).what == "region r is called with (state<kv>)"


# What the types themselves refuse.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dim("N", 1, 2), "unknown dim 'N'"),
        (lambda: Dim("T", 0, 2), "dim T in .0, 2. is empty"),
        (lambda: Dim("T", 3, 2), "dim T in .3, 2. is empty"),
        (lambda: TensorType(torch.complex64, ()), "dtype torch.complex64 is not supported by the IR"),
        (lambda: Placement("tp", "split"), "unknown placement 'split'"),
        (lambda: StateSpec("row", "g", "page", TensorType(torch.int32, ())), "unknown state unit 'page'"),
        (lambda: built().find("z"), "program p has no input, param or state 'z'"),
    ],
)
def test_types_refuse(make: Callable[[], object], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        make()

"""`ingot target`: this machine, and which backend would compute each op on it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ingot.commands import Flag
from ingot.console import console, facts, print_json, print_table, size_text, table

if TYPE_CHECKING:
    from torch import fx

    from ingot.ir.ops.registry import Op
    from ingot.ir.program import Program
    from ingot.ir.target import Target


def show_target(*, json: Flag = False) -> None:
    """Show what was found on this machine, and which backend would compute each op.

    Parameters
    ----------
    json
        As JSON.
    """
    from ingot.cache import cache_root
    from ingot.ir.target import Target

    found = Target.detect("auto")
    # Only the CPU can be compiled for yet, whatever else is found.
    chosen = Target.detect("cpu")
    answer = {
        "found": found.model_dump(mode="json"),
        "compiles_for": chosen.name,
        "compiler": _compiler(),
        "cache": str(cache_root()),
        "ops": list(_claims(chosen)),
    }
    print_json(answer) if json else _print(answer)


def _compiler() -> str | None:
    """The C++ compiler's own name for itself; None when there is none."""
    from ingot.backends.inductor.emit import Inductor
    from ingot.ir.errors import BackendError

    try:
        return Inductor().toolchain()["c++"]
    except BackendError:
        return None


def _claims(target: "Target") -> Iterator[dict[str, Any]]:
    """For each op: the provider, the one in deterministic mode, and every refusal. The pass that compiling runs
    decides, on one call of each op with the arguments of its first sample."""
    from ingot.ir.ops import OPS
    from ingot.ir.plan import BucketClass
    from ingot.ir.plugins import load_user_ops
    from ingot.passes.base import PassContext
    from ingot.passes.choose_providers import ChooseProviders
    from ingot.passes.rewrite import Rewriter
    from ingot.request import BACKEND_CHOICES, BACKENDS, DEFAULT_MAX_BATCH, DEFAULT_MAX_TOKENS

    load_user_ops()
    program, nodes = one_call_of_each(OPS)
    chosen: dict[bool, dict[str, str]] = {}
    refusals: dict[str, list[str]] = {}
    for deterministic in (True, False):
        rewriter = Rewriter(program)
        context = PassContext(
            target=target,
            max_seq_len=DEFAULT_MAX_TOKENS,
            max_batch=DEFAULT_MAX_BATCH,
            max_tokens=DEFAULT_MAX_TOKENS,
            backends=tuple(BACKENDS[name]() for name in BACKEND_CHOICES["auto"]),
            deterministic=deterministic,
            bucket=BucketClass(name="any", tokens=(1, DEFAULT_MAX_TOKENS)),
        )
        ChooseProviders().run(rewriter, context)
        chosen[deterministic] = {name: node.meta["provider"] for name, node in nodes.items()}
        refusals = {
            name: [refusal.reason for refusal in rewriter.refusals if refusal.node == node.name]
            for name, node in nodes.items()
        }
    for name in nodes:
        yield {
            "op": name,
            "provider": chosen[False][name],
            "deterministic": chosen[True][name],
            "refusals": refusals[name],
        }


def one_call_of_each(ops: dict[str, "Op"]) -> tuple["Program", dict[str, "fx.Node"]]:
    """A program that calls every op once, and the calls by the op's name."""
    import torch

    from ingot.ir import build
    from ingot.ir.program import Program, Stage, StateSpec
    from ingot.ir.types import TensorType

    program = Program("ops", Stage.CACHED, {})
    nodes: dict[str, fx.Node] = {}
    for op in ops.values():
        sample = op.samples(torch.Generator().manual_seed(0), torch.float32)[0]

        def value(name: str, given: Any, op: "Op" = op) -> Any:
            if not isinstance(given, torch.Tensor):
                return given
            value_type, full = TensorType(given.dtype, tuple(given.shape)), f"{op.name}.{name}"
            if name in op.states:
                return program.add_state(full, StateSpec("sample", op.name, "sequence", value_type))
            return program.add_input(full, value_type)

        args = [value(name, given) for name, given in zip(op.parameters(), sample.args, strict=False)]
        kwargs = {name: value(name, given) for name, given in sample.kwargs.items()}
        nodes[f"ingot.{op.name}"] = build.call(program, op.overload, args, kwargs)
    return program, nodes


def _print(answer: dict[str, Any]) -> None:
    out, found = console(), answer["found"]
    sm = f", sm {found['sm']}" if found["sm"] is not None else ""
    print_table(
        out,
        facts(
            [
                ("found", f"{found['name']} ({found['device']}, {found['arch']}{sm})"),
                ("features", " ".join(found["features"])),
                ("memory", size_text(found["memory"])),
                ("cores", found["cores"]),
                ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
                ("compiles for", answer["compiles_for"]),
                ("C++ compiler", answer["compiler"] or "none: compile with --backend reference"),
                ("cache", answer["cache"]),
            ]
        ),
    )
    out.print()
    rows = [(one["op"], one["provider"], one["deterministic"], "; ".join(one["refusals"])) for one in answer["ops"]]
    print_table(out, table(("op", "provider", "deterministic", "refusals"), rows))

"""`ingot target`: show this machine or another target, and the backend that would compute each op on it."""

from typing import TYPE_CHECKING, Any

from ingot.cli.commands import AsJson
from ingot.cli.console import console, facts, print_json, print_table, size_text, table

if TYPE_CHECKING:
    from rich.console import Console

    from ingot.ir.machine.target import Target


def show_target(*, target: str = "auto", json: AsJson = False) -> None:
    """Show what was found on this machine, and the backend that would compute each op.

    Parameters
    ----------
    target
        The machine to show. auto is this machine's GPU, else its CPU. Also cpu, cuda, or a GPU by its capability, as in
        sm_90.
    """
    from ingot.compile.cache import cache_root
    from ingot.compile.competing import available
    from ingot.compile.op_claims import op_claims
    from ingot.compile.outside_backend import backend_facts
    from ingot.compile.tools import tools_found
    from ingot.ir.machine.target import Target

    chosen = Target.named(target)
    backends, unavailable = available(chosen)
    answer = {
        "target": chosen.model_dump(mode="json"),
        "runs_here": not (missing := chosen.missing_here()),
        "missing_here": missing,
        "no_gpu": _no_gpu(),
        "features": _features(chosen),
        "tools": tools_found(),
        "cache": str(cache_root()),
        "backends": [backend_facts(one) for one in backends],
        "unavailable": unavailable,
        "ops": [one.to_json() for one in op_claims(chosen, backends)],
    }
    print_json(answer) if json else _print(answer)


def _no_gpu() -> str:
    """Return why this machine has no usable GPU; "" if it has one."""
    from ingot.ir.errors import TargetError
    from ingot.ir.machine.target import Target

    try:
        Target.detect("cuda")
    except TargetError as error:
        return error.what
    return ""


def _features(target: "Target") -> list[dict[str, Any]]:
    """Return one dict for each GPU feature that kernels may use.

    "name" is the feature. "there" is True if the target has it. Otherwise "needs" says what the feature requires, and
    "without" says what Ingot uses instead.
    """
    from ingot.ir.machine.gpus import FEATURES, NVLINK, WITHOUT_NVLINK

    if target.sm is None:
        return [{"name": name, "there": True, "needs": "", "without": ""} for name in target.features]
    rows = [
        {"name": name, "there": name in target.features, "needs": one.needs, "without": one.without}
        for name, one in FEATURES.items()
    ]
    there = NVLINK in target.features
    return [*rows, {"name": NVLINK, "there": there, "needs": "another GPU, linked", "without": WITHOUT_NVLINK}]


def _print(answer: dict[str, Any]) -> None:
    out, target = console(), answer["target"]
    sm = f", compute capability {target['sm'] / 10:.1f}" if target["sm"] is not None else ""
    product = [("GPU", target["gpu"])] if target["gpu"] else []
    bandwidth = [("bandwidth", f"{size_text(target['bandwidth'])}/s")] if target["bandwidth"] else []
    print_table(
        out,
        facts(
            [
                ("target", f"{target['name']} ({target['device']}, {target['arch']}{sm})"),
                *product,
                ("memory", size_text(target["memory"])),
                *bandwidth,
                ("cores", target["cores"]),
                ("versions", ", ".join(f"{name} {version}" for name, version in target["versions"].items())),
                ("runs here", "yes" if answer["runs_here"] else f"no: {answer['missing_here']}"),
                *([("GPU here", f"none: {answer['no_gpu']}")] if answer["no_gpu"] and answer["runs_here"] else []),
                *answer["tools"].items(),
                ("cache", answer["cache"]),
            ]
        ),
    )
    out.print()
    if target["sm"] is None:
        print_table(out, facts([("features", " ".join(target["features"]))]))
    else:
        rows = [_feature_row(one) for one in answer["features"]]
        print_table(out, table(("feature", "there", "needs", "without it"), rows))
    out.print()
    columns = ("name", "kind", "package", "version")
    print_table(
        out, table(("backend", *columns[1:]), [tuple(one[name] for name in columns) for one in answer["backends"]])
    )
    out.print()
    _print_claims(out, answer["ops"], answer["unavailable"])


def _print_claims(out: "Console", ops: list[dict[str, Any]], unavailable: dict[str, str]) -> None:
    for name, reason in unavailable.items():
        out.print(f"{name} does not compete: {reason}", markup=False, soft_wrap=True)
    everywhere = set.intersection(*(set(one["refusals"]) for one in ops))
    for reason in sorted(everywhere):
        out.print(f"of every op: {reason}", markup=False, soft_wrap=True)
    steps = [f"T={tokens}" for tokens in ops[0]["backends"]]
    rows = [
        (
            one["op"],
            *one["backends"].values(),
            one["deterministic"],
            "; ".join(reason for reason in one["refusals"] if reason not in everywhere),
        )
        for one in ops
    ]
    print_table(out, table(("op", *steps, "deterministic", "refusals"), rows))


def _feature_row(one: dict[str, Any]) -> tuple[str, ...]:
    if one["there"]:
        return one["name"], "yes", "", ""
    return one["name"], "no", one["needs"], one["without"]

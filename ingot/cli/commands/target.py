"""`ingot target`: show this machine or another target, and the backend that would compute each op on it."""

from typing import TYPE_CHECKING, Any

from ingot.cli.commands import UNTRIED, AsJson, Flag
from ingot.cli.console import console, facts, print_json, print_table, size_text, table
from ingot.ir.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from ingot.ir.machine.target import Target


def show_target(
    *,
    target: str = "auto",
    explain: Flag = False,
    op: str | None = None,
    backend: str = "auto",
    deterministic: Flag = False,
    tuning_log: str | None = None,
    json: AsJson = False,
) -> None:
    """Show what was found on this machine, and the backend that would compute each op.

    Parameters
    ----------
    target
        The machine to show. auto is this machine's GPU, else its CPU. Also cpu, cuda, or a GPU by its capability, as in
        sm_90.
    explain
        Show instead, for each op and range of step sizes, the answer of every backend, and why the winner wins.
    op
        With --explain: only this op, as in linear.
    backend
        With --explain: the backends that compete, as --backend of compile-model.
    deterministic
        With --explain: the choice of a deterministic compile.
    tuning_log
        With --explain: an artifact or its tuning.json. Its measured times are shown, and decide.
    """
    if explain:
        _explain(target, op or "", backend, tuning_log, deterministic=deterministic, json=json)
        return
    if op is not None or backend != "auto" or deterministic or tuning_log is not None:
        raise OptionError("--op, --backend, --deterministic or --tuning-log without --explain", expected="--explain")
    from ingot.compile.cache import cache_root
    from ingot.compile.competing import available, on_request
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
        "tried": chosen.tried,
        "no_gpu": _no_gpu(),
        "features": _features(chosen),
        "tools": tools_found(),
        "cache": str(cache_root()),
        "backends": [backend_facts(one) for one in backends],
        "unavailable": unavailable,
        "on_request": on_request(chosen),
        "ops": [one.to_json() for one in op_claims(chosen, backends)],
    }
    print_json(answer) if json else _print(answer)


def _explain(target: str, op: str, backend: str, log: str | None, *, deterministic: bool, json: bool) -> None:
    """Show which backend would compute each op in each bucket class, all answers, and why the winner wins."""
    from ingot.compile.competing import available, competitors
    from ingot.compile.op_choices import op_choices
    from ingot.compile.timing.tuning_log import read_log
    from ingot.ir.machine.target import Target

    chosen = Target.named(target)
    if backend == "auto":
        backends, unavailable = available(chosen)
    else:
        found = competitors(backend, chosen)
        backends, unavailable = found.backends, dict(found.dropped)
    measured = () if log is None else read_log(log, chosen).given_calls()
    choices = op_choices(chosen, backends, op=op, deterministic=deterministic, measured=measured)
    if json:
        print_json({"target": chosen.name, "unavailable": unavailable, "choices": [one.to_json() for one in choices]})
        return
    out = console()
    _print_unavailable(out, unavailable)
    for one in choices:
        first, last = one.tokens
        steps = f"{first}–{last} tokens" if first < last else f"{first} token" + "s" * (first > 1)
        out.print(f"{one.op}, {one.bucket} ({steps}): {one.backend}", style="bold", markup=False, soft_wrap=True)
        out.print(f"  {one.why}", markup=False, soft_wrap=True)
        timed = any(answer.times for answer in one.answers)
        rows = [(f"  {one.backend}", str(one), *["; ".join(one.times)] * timed) for one in one.answers]
        print_table(out, table(("  backend", "claim", *["times"] * timed), rows))
        out.print()


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
                *([] if answer["tried"] else [("untried", UNTRIED)]),
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
    for name, reason in answer["on_request"].items():
        text = f"{name} competes only if --backend names it" + (f", and cannot here: {reason}" if reason else "")
        out.print(text, markup=False, soft_wrap=True)
    _print_claims(out, answer["ops"], answer["unavailable"])


def _print_unavailable(out: "Console", unavailable: dict[str, str]) -> None:
    for name, reason in unavailable.items():
        out.print(f"{name} does not compete: {reason}", markup=False, soft_wrap=True)


def _print_claims(out: "Console", ops: list[dict[str, Any]], unavailable: dict[str, str]) -> None:
    _print_unavailable(out, unavailable)
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

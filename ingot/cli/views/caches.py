"""Print the cache groups of an artifact: a table, and notes that explain its numbers."""

from typing import TYPE_CHECKING, Any

from ingot.cli.console import print_table, size_text, table

if TYPE_CHECKING:
    from rich.console import Console

_NONE = "cache groups  none: the model has no paged KV cache"


def print_caches(out: "Console", caches: dict[str, Any]) -> None:
    """Print an artifact's cache groups, with notes. A cache group is a set of KV caches that share page numbers.

    `caches` is a `CacheSummary` as JSON.
    """
    groups = caches["groups"]
    if groups:
        columns = ("cache group", "keeps", "page>", "between steps>", "in a step>", "layers", "a token in each layer")
        print_table(out, table(columns, [_row(one) for one in groups]))
        sizes = {one["page_tokens"] for one in groups} - {0}
        tokens = f" of {sizes.pop()} tokens" if len(sizes) == 1 else ""
        lines = [
            f"between steps, in a step: pages{tokens} that one sequence at full length holds at most; a step has up"
            f" to {caches['step_tokens']} tokens"
        ]
        if any(one["reserved"] for one in groups):
            names = ", ".join(one["name"] for one in groups if one["reserved"])
            lines.append(f"{names}: one more page, which replaces freed pages in page tables")
        lines += filter(None, map(scratch_text, groups))
        for line in lines:
            out.print(line, style="dim", markup=False, soft_wrap=True)
    else:
        out.print(_NONE, markup=False, soft_wrap=True)
    for entry, text in caches["together"].items():
        out.print(f"{entry}: {text}", markup=False, soft_wrap=True)


def scratch_text(one: dict[str, Any]) -> str:
    """Return a line about a cache group's scratch pages. They hold keys and values of a long prompt during one step.

    `one` describes the group, as in the JSON of `CacheSummary`. If the group has no scratch pages, the line says why.
    It is "" for a group without a sliding window, since such a group never needs them.
    """
    if one["scratch_pages"]:
        return (
            f"{one['name']}: {one['scratch_pages']} scratch pages, {size_text(one['scratch_bytes'])} for all layers,"
            " hold keys and values of a long prompt for one step"
        )
    return f"{one['name']}: no scratch pages, because {one['why_none']}" if one["why_none"] else ""


def _row(one: dict[str, Any]) -> tuple[object, ...]:
    pages = [f"{one[name]} page{'' if one[name] == 1 else 's'}" for name in ("between_steps", "in_step")]
    return one["name"], one["keeps"], size_text(one["page_bytes"]), *pages, one["layers"], "; ".join(one["forms"])

"""Describe the memory that serving an artifact takes, a line for each part."""

from typing import TYPE_CHECKING

from ingot.cli.console import size_text
from ingot.ir.cache.slot_limits import KEPT_PER_SEQUENCE

if TYPE_CHECKING:
    from ingot.ir.artifact.plan import Plans
    from ingot.ir.cache.memory import MemoryNeed


def memory_rows(plans: "Plans") -> list[tuple[str, object]]:
    """Return table rows about the memory that serving the plans takes. A row is a name and a text.

    The rows are weights, peak activations, KV cache and per-sequence states. The last row has two sums: the least
    memory that serving needs, and the memory for the compiled limits.
    """
    from ingot.ir.cache.memory import MemoryNeed  # not at the top: `--help` loads no schemas

    need = MemoryNeed.of(plans)
    buckets = [bucket for plan in plans.plans.values() for bucket in plan.buckets]
    worst = max(buckets, key=lambda bucket: bucket.memory.activations)
    sizes, target = worst.memory.sizes, worst.instructions[worst.memory.peak].target
    step = f"{sizes['T']} tokens of {sizes.get('B', 1)} sequences"
    sequences = max(bucket.memory.sizes.get("B", 1) for bucket in buckets)
    kv = sum(need.most(name, sequences) * group.page for name, group in need.groups.items())
    return [
        ("weights", size_text(need.weights)),
        (
            "activations",
            f"{size_text(need.activations)} at the peak of {step}, in {target[:24]}",
        ),
        *(
            (
                "KV cache" if len(need.groups) == 1 else f"KV cache, {name}",
                f"{size_text(group.page)} a page, {size_text(group.page * group.pages_per_sequence)} a sequence at full"
                f" length ({_pages(name, need)})",
            )
            for name, group in need.groups.items()
        ),
        *([("scratch pages", _scratch_text(need))] if need.scratch_bytes else []),
        *([] if need.groups else [("KV cache", "none")]),
        *([("slots", _slots_text(need.slot, need.sequences))] if need.slot else []),
        ("in all", f"{size_text(need.fixed + need.sequence)} at least, {size_text(need.fixed + kv)} for the limits"),
    ]


def _slots_text(slot: int, sequences: int) -> str:
    """Return text about the memory of states that each sequence has, such as a convolution's.

    `slot` is the bytes for one sequence. `sequences` is the maximum number of running sequences.
    """
    kept = KEPT_PER_SEQUENCE * sequences
    return f"{size_text(slot)} a sequence, {size_text(slot * sequences)} for {sequences}, and up to {kept} kept"


def _scratch_text(need: "MemoryNeed") -> str:
    """Return text about the memory of scratch pages.

    Caches with a sliding window use scratch pages for a long prompt, during one step. These are not pages of a
    sequence.
    """
    pages = ", ".join(f"{one.pages} of {name}" for name, one in need.scratch.items() if one.pages)
    return f"{size_text(need.scratch_bytes)} ({pages}) for reads of one step"


def _pages(name: str, need: "MemoryNeed") -> str:
    """Return text about how many pages one sequence holds in the cache group `name`.

    A cache group is a set of KV caches that share page numbers. The text has the maximum between steps. It also has the
    number of further pages that the sequence's largest step needs.
    """
    pages, extra = f"{need.groups[name].pages_per_sequence} pages", need.extra_in_step(name)
    return f"{pages}, and {extra} more in its largest step" if extra else pages

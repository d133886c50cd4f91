"""Describe the memory that serving an artifact takes, a line for each part."""

from typing import TYPE_CHECKING

from ingot.cli.console import size_text
from ingot.ir.cache.slot_limits import KEPT_PER_SEQUENCE

if TYPE_CHECKING:
    from ingot.ir.artifact.plan import Plans
    from ingot.ir.cache.memory import MemoryNeed


def memory_rows(plans: "Plans") -> list[tuple[str, object]]:
    """Return pairs of a name and a text about weights, peak activations, KV cache, slots, and their sum
    for the limits.
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
    """Return the memory of states with a slot of `slot` bytes for each sequence, for `sequences` sequences."""
    kept = KEPT_PER_SEQUENCE * sequences
    return f"{size_text(slot)} a sequence, {size_text(slot * sequences)} for {sequences}, and up to {kept} kept"


def _scratch_text(need: "MemoryNeed") -> str:
    """Return the memory of the scratch pages, which cache groups with a window take in addition to the pages of
    sequences.
    """
    pages = ", ".join(f"{one.pages} of {name}" for name, one in need.scratch.items() if one.pages)
    return f"{size_text(need.scratch_bytes)} ({pages}) for reads of one step"


def _pages(name: str, need: "MemoryNeed") -> str:
    """Return as text how many pages of the group `name` a sequence holds between steps, and how many more in its
    largest step.
    """
    pages, extra = f"{need.groups[name].pages_per_sequence} pages", need.extra_in_step(name)
    return f"{pages}, and {extra} more in its largest step" if extra else pages

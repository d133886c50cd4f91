"""`ingot verify`: check that an artifact computes what it did when it was compiled."""

from typing import TYPE_CHECKING

from ingot.cli.commands import ArtifactFolder, AsJson, Variant
from ingot.cli.console import console, facts, print_json, print_table, table

if TYPE_CHECKING:
    from ingot.debug.verification import Verification


def verify_artifact(artifact: ArtifactFolder, /, *, variant: Variant = None, json: AsJson = False) -> None:
    """Load an artifact and repeat its golden run, a short run that the compile recorded. Fail if the results differ.

    On the kind of processor that compiled the artifact, the bits must be equal. On another processor, logits may differ
    by the tolerance of the model's dtype.
    """
    from ingot.debug.verify import verify
    from ingot.runtime.loading.variants import variant_folder

    found = verify(variant_folder(artifact, variant))
    if json:
        print_json(found.to_json())
    else:
        _print(found)
    if error := found.error():
        raise error


def _print(found: "Verification") -> None:
    out = console()
    promise = f"{found.promise.value}, since {found.why}"
    print_table(out, facts([("artifact", found.artifact), ("build id", found.build_id), ("promised", promise)]))
    out.print()
    rows = [
        (
            one.bucket if one.entry == "main" else f"{one.entry}@{one.bucket}",
            one.steps,
            one.positions,
            one.bitwise_equal,
            one.tokens_equal,
            f"{one.max_error:.3g}",
            f"{one.allowed:.3g}",
        )
        for one in found.results
    ]
    columns = ("bucket", "steps>", "positions>", "same bits>", "same token>", "max error>", "allowed>")
    print_table(out, table(columns, rows))
    if found.holds:
        out.print("\nThe golden run repeats.", style="bold")
        out.print(
            "The artifact computes what it did when it was compiled. `ingot bisect` checks whether that is correct.",
            markup=False,
            soft_wrap=True,
        )

"""`ingot why-miss`: name the inputs that differ between two artifacts, or between an artifact and a new compile."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from ingot.cli.commands import ArtifactFolder, AsJson, Variant
from ingot.cli.commands.compile import compile_checkpoint
from ingot.cli.console import console, print_json
from ingot.hub.name import hub_name
from ingot.ir.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from ingot.debug.identity_diff import Document
    from ingot.debug.why_miss import Miss

_SHOWN = 20  # changes: more would not fit on a screen, and mean another version of Ingot
_KEY_SHOWN = 12  # hexadecimal digits of a key


def why_artifacts_differ(
    a: ArtifactFolder,
    b: str,
    /,
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    variant: Variant = None,
    json: AsJson = False,
) -> None:
    """Show which inputs of two compiles differ, and so why the second compile did not find the first one's result in
    the cache.

    Parameters
    ----------
    b
        Another artifact. Or a checkpoint (a folder, or a name on the hub), to compare with compiling it. Nothing is
        compiled.
    options
        With a checkpoint, options of its compile, as `ingot compile` takes them.
    """
    from ingot.debug.why_miss import identity_of, why_miss, why_requests_differ
    from ingot.runtime.loading.artifact import open_artifact

    first = open_artifact(a, variant=variant)
    if (Path(b) / "config.json").is_file() or hub_name(b) is not None:
        found = why_requests_differ(identity_of(first), _requested(b, options, first.manifest.target.get("name")))
    elif options:
        raise OptionError(
            f"options {' '.join(options)} of an artifact", where=b, expected="a checkpoint folder, or no options"
        )
    else:
        found = why_miss(first, open_artifact(b, variant=variant))
    print_json(found.to_json()) if json else _print(found)


def _requested(checkpoint: str, options: Sequence[str], variant: object) -> "Document":
    """Return a JSON document of everything that determines the artifact of a checkpoint.

    `options` are the options of `ingot compile`. If they name several targets, the artifact is the `variant`. The
    digest of the document is the `request_key`, by which the compile cache finds an artifact.
    """
    parser = App(name="why-miss")
    parser.default(compile_checkpoint)
    try:
        _, bound, *_ = parser.parse_args([checkpoint, "--output", "", *options], exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise OptionError(str(error), expected="the options of `ingot compile`") from None
    bound.apply_defaults()

    import inspect

    from ingot.compile.request import Request
    from ingot.compile.targets import read_requests
    from ingot.ir.mesh import parse_mesh

    decide = inspect.signature(Request.read).parameters
    given: dict[str, Any] = {name: value for name, value in bound.arguments.items() if name in decide}
    requests = read_requests(**{**given, "mesh": parse_mesh(given["mesh"] or "")})
    if len(requests) == 1:
        (request,) = requests
    elif not (found := [one for one in requests if one.target.name == variant]):
        names = ", ".join(one.target.name for one in requests)
        raise OptionError(f"the targets have no {variant}, the artifact's", where="--target", expected=names)
    else:
        (request,) = found
    return request.identity(request.trace())


def _print(found: "Miss") -> None:
    out = console()
    if not found:
        out.print(f"same request_key {found.keys[0]}", markup=False)
    else:
        causes = found.causes
        fields = "one input" if len(causes) == 1 else f"{len(causes)} inputs"
        out.print(f"the request_key differs by {fields}:", style="bold", markup=False)
        _list(out, [str(change) for change in causes])
        following: dict[str, list[str]] = {}
        for change in found.changes:
            if change.follows:
                following.setdefault(change.follows, []).append(change.path)
        if following:
            out.print("consequences:", markup=False)
            _list(out, [f"{', '.join(paths)}  (from {cause})" for cause, paths in following.items()])
    if found.builds is not None:
        _print_contents(out, found)


def _print_contents(out: "Console", found: "Miss") -> None:
    assert found.builds is not None
    if found.builds[0] == found.builds[1]:
        out.print(f"same build_id {found.builds[0]}", markup=False)
    else:
        out.print(f"the build_id differs, first in {found.file}", markup=False, soft_wrap=True)
    alone = sum(max(len(one.a), len(one.b)) for one in found.not_shared)
    if not found.shared and not alone:
        return
    out.print(f"executables: {found.shared} shared, {alone} not", markup=False)
    for one in found.not_shared:
        keys = " ".join(key[:_KEY_SHOWN] for key in (one.b or one.a))
        if not one.changes:
            out.print(f"  {keys}: only in {'A' if one.a else 'B'}", markup=False, soft_wrap=True)
            continue
        out.print(f"  {keys}:", markup=False, soft_wrap=True)
        _list(out, [str(change) for change in one.changes], "    ")


def _list(out: "Console", lines: Sequence[str], indent: str = "  ") -> None:
    for line in lines[:_SHOWN]:
        out.print(indent + line, markup=False, soft_wrap=True)
    if len(lines) > _SHOWN:
        out.print(f"{indent}… and {len(lines) - _SHOWN} more", markup=False)

"""Choose the variant of a fat artifact, which is compiled for several targets, that fits a machine."""

from pathlib import Path

from pydantic import ValidationError

from ingot.ir.artifact.manifest import SCHEMA_VERSION
from ingot.ir.artifact.manifest_file import VARIANTS, VARIANTS_FOLDER, target_of
from ingot.ir.artifact.variants import VARIANT_CHECKSUM, Variants, variants_checksum
from ingot.ir.errors import ArtifactError, TargetError
from ingot.ir.json_text import parse_json
from ingot.ir.machine.find_gpu import find_gpu
from ingot.runtime.loading.artifact_files import read_capped, recorded_checkpoint

_AGAIN = "compile the model again, or copy the whole artifact again"


def variant_folder(path: str | Path, variant: str | None = None) -> Path:
    """Return the folder of the artifact to use in `path`: `path` itself, or a variant of a fat artifact.

    `variant` is the name of a target, such as "sm_90". None means this machine's: the capability of its GPU if it has
    one, else "cpu". The artifact in the returned folder is not checked. Raises ArtifactError for a damaged fat artifact
    or an unknown variant, and TargetError if no variant is for this machine.
    """
    folder = Path(path)
    if not (folder / VARIANTS).is_file():
        if variant is not None and (own := target_of(folder)) not in (None, variant):
            raise ArtifactError(
                f"the artifact has no variant '{variant:.80}'", where=str(folder), expected=f"{own}, its only target"
            )
        return folder
    known = read_variants(folder).variants
    if variant is not None and variant not in known:
        raise ArtifactError(
            f"the artifact has no variant '{variant:.80}'", where=str(folder), expected=", ".join(known)
        )
    name = variant or _machine_variant(folder, list(known))
    return folder / VARIANTS_FOLDER / name


def fat_targets(folder: Path) -> list[str]:
    """Return the names of the targets of a fat artifact; an empty list for any other path. Raises ArtifactError."""
    return list(read_variants(folder).variants) if (folder / VARIANTS).is_file() else []


def read_variants(folder: Path) -> Variants:
    """Read and check variants.json of the fat artifact `folder`. Raises ArtifactError."""
    for name in (VARIANTS, VARIANT_CHECKSUM, VARIANTS_FOLDER):
        if (folder / name).is_symlink():
            raise ArtifactError(f"{name} is a link", where=str(folder), expected="a file or folder", hint=_AGAIN)
    try:
        text, found = read_capped(folder / VARIANTS), read_capped(folder / VARIANT_CHECKSUM)
    except OSError as error:
        raise ArtifactError(
            f"the artifact cannot be read: {error.strerror}", where=str(error.filename), hint=_AGAIN
        ) from error
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ArtifactError(f"{VARIANTS} is not JSON: {error}", where=str(folder), hint=_AGAIN) from None
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise ArtifactError(
            f"the artifact has schema version {version!s:.80}",
            where=str(folder / VARIANTS),
            expected=f"schema version {SCHEMA_VERSION}, the one that this Ingot reads",
            hint="compile it again, or run it with the Ingot that compiled it",
        )
    if found != variants_checksum(text)[0].encode():
        raise ArtifactError(
            f"{VARIANTS} does not match its checksum in {VARIANT_CHECKSUM}: one of the two is damaged",
            where=str(folder),
            hint=_AGAIN,
        )
    try:
        return Variants.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(
            f"{VARIANTS} is malformed: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=str(folder),
            hint=_AGAIN,
        ) from None


def check_variant(folder: Path, name: str, build_id: str) -> None:
    """Raise ArtifactError if the fat artifact `folder` has no variant `name` with the `build_id`."""
    known = read_variants(folder).variants
    if name not in known or known[name].build_id != build_id:
        raise ArtifactError(
            f"the manifest of the variant '{name:.80}' is not the one that {VARIANTS} names",
            where=str(folder),
            expected=known[name].build_id if name in known else ", ".join(known),
            hint=_AGAIN,
        )


def _machine_variant(folder: Path, known: list[str]) -> str:
    """Return the variant for this machine: the name of its target, if that is one of `known`. Raises TargetError."""
    try:
        gpu = find_gpu()
        name, machine = gpu.target, f"{gpu.target} ({gpu.product})"
    except TargetError as error:
        name, machine = "cpu", f"cpu: {error.what}"
    if name in known:
        return name
    source = recorded_checkpoint(folder / VARIANTS_FOLDER / known[0]) if known else "CHECKPOINT"
    raise TargetError(
        f"no variant of the artifact fits this machine, {machine}",
        where=str(folder),
        expected=f"a machine of {', '.join(known)}",
        hint=f"`compile-model {source} -o NAME.ingot --target {','.join((*known, name))}` adds one for it; "
        f"{folder}/{VARIANTS_FOLDER}/NAME is the artifact of a variant",
    )

"""The schema of variants.json, which makes a folder a fat artifact: one model, compiled for several targets.

A fat artifact is a folder of artifacts that share files:

    variants.json      the Variants below, in canonical JSON; its SHA-256 is the fat artifact's `build_id`
    variants.sha256    the checksum of variants.json, in the format of `sha256sum -c`
    variants/TARGET/   an artifact for each target, with a manifest of its own
    weights/           the weights of all variants, each distinct tensor once; in weights/TARGET+TARGET/ those that only
                       some variants read
    tokenizer/         the tokenizer of all variants

A file that several variants have in common is stored once. The manifests of the others say where (`FileEntry.shared`).
"""

import hashlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ingot.ir.artifact.manifest import Digest
from ingot.ir.artifact.manifest_file import VARIANTS
from ingot.ir.json_text import dump_json

VARIANT_CHECKSUM = "variants.sha256"


class Variant(BaseModel):
    """One variant of a fat artifact.

    build_id   the SHA-256 of its manifest.json
    tried      whether code for such machines has ever run on one, as in `Manifest`
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    build_id: Digest
    tried: bool


class Variants(BaseModel):
    """The contents of variants.json.

    schema_version  the version of the artifacts' schema
    name            the artifact's name
    request_key     the key of the fat artifact in the compile cache
    variants        by the name of the target, such as "sm_90"
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    schema_version: int
    name: Annotated[str, Field(min_length=1)]
    request_key: Annotated[str, Field(min_length=1)]
    variants: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}\z")], Variant]

    def dump(self) -> str:
        """Return the text of variants.json."""
        return dump_json(self.model_dump(mode="json"))


def variants_checksum(text: bytes) -> tuple[str, str]:
    """Return (text of variants.sha256, `build_id`). `text` is variants.json as bytes."""
    build_id = hashlib.sha256(text).hexdigest()
    return f"{build_id}  {VARIANTS}\n", build_id

"""Make the JSON object that `ingot bench` writes: the results, and what was measured, when and where."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ingot.bench.machine import PACKAGES, package_versions, this_machine
from ingot.runtime.loading.artifact import Artifact


def answer(artifact: Artifact, options: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object that `ingot bench` writes for one measurement of `artifact`.

    It holds all `options` and `metrics`, the date, the machine, the versions of packages, and the artifact's identity.
    An infinite option, such as the request rate, is written as "inf", because JSON has no infinity.
    """
    manifest = artifact.manifest
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),  # as `vllm bench` writes it
        "backend": "ingot",
        "model_id": artifact.folder.name,
        **{name: "inf" if value == float("inf") else value for name, value in options.items()},
        **metrics,
        "machine": this_machine().model_dump(mode="json"),
        "versions": package_versions(("ingot", *PACKAGES)),
        "artifact": {
            "name": manifest.name,
            "build_id": artifact.build_id,
            "request_key": manifest.request_key,
            "exe_keys": list(manifest.exe_keys),
            "target": manifest.target.get("name"),
            **{name: manifest.model.get(name) for name in ("dtype", "max_batch", "max_tokens", "max_seq_len")},
        },
    }

"""Summarize an artifact: model, target, identities, sizes, and the result of each pass."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ingot.cli.console import console, counts_text, facts, print_table, size_text, table
from ingot.cli.views.caches import print_caches
from ingot.cli.views.plan import buckets_of, read_plans
from ingot.cli.views.quantization import quantization_of, quantization_text
from ingot.ir.artifact.manifest import REQUEST, UNLISTED
from ingot.ir.artifact.trace import HOW_TO_GET, TraceEntry, trace_name
from ingot.ir.cache.summary import CacheSummary
from ingot.runtime.loading.artifact import Artifact
from ingot.runtime.loading.variants import read_variants

if TYPE_CHECKING:
    from rich.table import Table


def summary(artifact: Artifact) -> dict[str, Any]:
    """Return the summary of an artifact as JSON values, with sizes in bytes.

    Times are None if the artifact has no timings. "passes" is None if it has no trace. "hub" is the commit of the
    checkpoint on the Hugging Face hub, None for a local checkpoint.
    """
    manifest, plans = artifact.manifest, read_plans(artifact)
    variants = read_variants(artifact.shared).variants if artifact.shared != artifact.folder else {}
    backends: dict[str, int] = {}
    for _, bucket in buckets_of(plans):
        for name, count in bucket.nodes_per_backend().items():
            backends[name] = backends.get(name, 0) + count
    return {
        "path": str(artifact.folder),
        "name": manifest.name,
        "hub": _hub(artifact),
        "schema_version": manifest.schema_version,
        "model": dict(manifest.model),
        "target": dict(manifest.target),
        "tried": manifest.tried,
        "variants": {name: one.model_dump() for name, one in variants.items()},
        "versions": dict(manifest.versions),
        "tokenizer": any(entry.path == "tokenizer/tokenizer.json" for entry in manifest.files),
        "identities": {
            "build_id": artifact.build_id,
            "request_key": manifest.request_key,
            "exe_keys": list(manifest.exe_keys),
        },
        "buckets": [
            {
                "name": name,
                "tokens": list(bucket.bucket.tokens),
                "q_max": bucket.bucket.q_max,
                "features": list(bucket.bucket.features),
                "instructions": len(bucket.instructions),
                "region_calls": sum(one.target.startswith("exe.") for one in bucket.instructions),
            }
            for name, bucket in buckets_of(plans)
        ],
        "executables": len(plans.executables),
        "nodes_per_backend": backends,
        "bytes": _sizes(artifact),
        "skipped_fusions": _skipped_in(artifact),
        "quantization": None if (record := quantization_of(artifact)) is None else quantization_text(record),
        "caches": CacheSummary.of(plans).to_json(),
        "passes": [_pass(run) for run in artifact.trace] if artifact.has_trace else None,
    }


def _hub(artifact: Artifact) -> str | None:
    timings = artifact.read_timings()
    found = timings.get("hub") if isinstance(timings, dict) else None
    return found if isinstance(found, str) else None


def _skipped_in(artifact: Artifact) -> list[dict[str, Any]]:
    """Return the fusions that the compile skipped because of their rounding errors, one dict each.

    `RoundingCheck.decision` describes the dicts.
    """
    request = artifact.read_json(REQUEST)
    identity = request.get("identity") if isinstance(request, dict) else None
    found = identity.get("skipped_fusions") if isinstance(identity, dict) else None
    return found if isinstance(found, list) else []


def _pass(run: TraceEntry) -> dict[str, Any]:
    return {
        "name": run.name,
        "entry": run.entry,
        "bucket": run.bucket,
        "stage": run.stage,
        "options": run.options,
        "numerics": run.numerics.value,
        "matches": run.matches,
        "refusals": len(run.refusals),
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Print the result of `summary` as tables."""
    out = console()
    print_table(out, _identity(summary))
    out.print()
    print_table(out, _buckets(summary["buckets"]))
    out.print()
    print_table(out, _contents(summary))
    out.print()
    print_caches(out, summary["caches"])
    out.print()
    if summary["passes"] is None:
        out.print(f"passes not recorded: {HOW_TO_GET} to see them", markup=False, soft_wrap=True)
    else:
        print_table(out, _passes(summary["passes"]))


def _identity(summary: dict[str, Any]) -> "Table":
    model, ids, versions = summary["model"], summary["identities"], summary["versions"]
    limits = ("max_seq_len", "max_batch", "max_tokens", "page_size")
    rest = {key: value for key, value in model.items() if key not in (*limits, "architecture", "family", "dtype")}
    return facts(
        [
            ("artifact", summary["path"]),
            *([("checkpoint", summary["hub"])] if summary["hub"] is not None else []),
            ("model", f"{model.get('architecture')} ({model.get('family')}), {model.get('dtype')}"),
            ("", ", ".join(f"{key} {value}" for key, value in rest.items())),
            ("tokenizer", "yes" if summary["tokenizer"] else "none: token ids only"),
            ("limits", ", ".join(f"{key} {model.get(key)}" for key in limits)),
            ("target", _target_text(summary["target"], tried=summary["tried"])),
            *_variants(summary["variants"]),
            *([("versions", ", ".join(f"{key} {value}" for key, value in versions.items()))] if versions else []),
            ("schema", summary["schema_version"]),
            ("build id", ids["build_id"]),
            ("request key", ids["request_key"]),
        ]
    )


def _buckets(buckets: Sequence[dict[str, Any]]) -> "Table":
    rows = [
        (
            bucket["name"],
            "{}–{}".format(*bucket["tokens"]),
            "any" if bucket["q_max"] is None else bucket["q_max"],
            bucket["instructions"],
            bucket["region_calls"],
        )
        for bucket in buckets
    ]
    return table(("bucket class", "tokens", "q_max", "instructions>", "region calls>"), rows)


def _contents(summary: dict[str, Any]) -> "Table":
    return facts(
        [
            ("executables", f"{summary['executables']} distinct"),
            ("nodes per backend", counts_text(summary["nodes_per_backend"])),
            *_skipped_fusions(summary["skipped_fusions"]),
            *([("quantized", summary["quantization"])] if summary["quantization"] else []),
            ("size", ", ".join(f"{name} {size_text(size)}" for name, size in summary["bytes"].items())),
        ]
    )


def _skipped_fusions(skipped: Sequence[dict[str, Any]]) -> list[tuple[str, object]]:
    """Return table rows for the skipped fusions: a row for each pass, with the locations of its skipped fusions."""
    locations: dict[str, list[str]] = {}
    for one in skipped:
        locations.setdefault(one["pass"], []).append(one["location"])
    names = [f"{name} ({'; '.join(found)})" for name, found in locations.items()]
    return [("skipped fusions" if row == 0 else "", text) for row, text in enumerate(names)]


def _passes(passes: Sequence[dict[str, Any]]) -> "Table":
    columns = ("pass", "bucket", "leads to", "numerics", "matches>", "refusals>", "seconds>", "process at most>")
    rows = [
        (
            one["name"] + _options_text(one["options"]),
            trace_name(one["entry"], one["bucket"]) or "–",
            one["stage"],
            one["numerics"],
            one["matches"],
            one["refusals"],
            "–" if one["seconds"] is None else f"{one['seconds']:.3f}",
            "–" if one["peak_bytes"] is None else size_text(one["peak_bytes"]),
        )
        for one in passes
    ]
    return table(columns, rows)


def _variants(variants: dict[str, Any]) -> list[tuple[str, object]]:
    names = [name if one["tried"] else f"{name} (untried on hardware)" for name, one in variants.items()]
    return [("variants", ", ".join(names))] if names else []


def _target_text(target: dict[str, Any], *, tried: bool) -> str:
    sm = f", sm {target['sm']}" if target.get("sm") is not None else ""
    features = " ".join(target.get("features") or ())
    return f"{target.get('name')} ({target.get('arch')}{sm}) {features}".rstrip() + (
        "" if tried else "; untried on hardware"
    )


def _options_text(options: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name}={value}" for name, value in options.items()) + "}" if options else ""


def _sizes(artifact: Artifact) -> dict[str, int]:
    """Return the bytes of an artifact's files by top-level folder, largest first.

    "other" is the sum of the files outside these folders. "total" is the sum of all files.
    """
    sizes: dict[str, int] = {}
    for entry in artifact.manifest.files:
        folder, slash, _ = entry.path.partition("/")
        sizes[folder if slash else "other"] = sizes.get(folder if slash else "other", 0) + entry.size
    for name in UNLISTED:
        path = artifact.folder / name
        sizes["other"] = sizes.get("other", 0) + (path.stat().st_size if path.exists() else 0)
    return {**dict(sorted(sizes.items(), key=lambda item: -item[1])), "total": sum(sizes.values())}

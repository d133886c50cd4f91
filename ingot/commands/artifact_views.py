"""What `ingot inspect` shows of an open artifact: a summary, program texts, the plan, the weights."""

import difflib
import re
from typing import Any

from pydantic import ValidationError

from ingot.commands.memory_view import memory_rows
from ingot.console import console, counts_text, facts, print_table, size_text, table
from ingot.ir.artifact import TIMINGS, UNLISTED, trace_file, trace_name
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.json_text import parse_json
from ingot.ir.plan import Argument, BucketPlan, DType, Plans, Ref
from ingot.runtime.artifact import Artifact

_TRACED = "TRACED"  # what the frontend hands over: no pass leads there
_EXE_SHOWN = 12  # hexadecimal digits of an executable's id: enough to tell a few thousand apart


def summary(artifact: Artifact) -> dict[str, Any]:
    """The summary as one JSON value; sizes in bytes, seconds None where the artifact lost its timings."""
    manifest, plans = artifact.manifest, _plans(artifact)
    seconds = _pass_seconds(artifact)
    providers: dict[str, int] = {}
    for _, bucket in _buckets(plans):
        for name, count in bucket.nodes_per_provider().items():
            providers[name] = providers.get(name, 0) + count
    return {
        "path": str(artifact.folder),
        "name": manifest.name,
        "schema_version": manifest.schema_version,
        "model": dict(manifest.model),
        "target": dict(manifest.target),
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
            for name, bucket in _buckets(plans)
        ],
        "executables": len(plans.executables),
        "nodes_per_provider": providers,
        "bytes": _sizes(artifact),
        "passes": [
            {
                **{key: record[key] for key in ("name", "entry", "bucket", "stage", "options", "numerics", "matches")},
                "refusals": len(record["refusals"]),
                "seconds": seconds.get((record["name"], record["entry"], record["bucket"])),
            }
            for record in _passes(artifact)
        ],
    }


def print_summary(summary: dict[str, Any]) -> None:
    """The summary for people."""
    out = console()
    model, target, ids = summary["model"], summary["target"], summary["identities"]
    limits = ("max_seq_len", "max_batch", "max_tokens", "page_size")
    rest = {key: value for key, value in model.items() if key not in (*limits, "architecture", "family", "dtype")}
    print_table(
        out,
        facts(
            [
                ("artifact", summary["path"]),
                ("model", f"{model.get('architecture')} ({model.get('family')}), {model.get('dtype')}"),
                ("", ", ".join(f"{key} {value}" for key, value in rest.items())),
                ("tokenizer", "yes" if summary["tokenizer"] else "none: token ids only"),
                ("limits", ", ".join(f"{key} {model.get(key)}" for key in limits)),
                ("target", _target_text(target)),
                ("versions", ", ".join(f"{key} {value}" for key, value in summary["versions"].items())),
                ("schema", summary["schema_version"]),
                ("build id", ids["build_id"]),
                ("request key", ids["request_key"]),
            ]
        ),
    )
    out.print()
    print_table(
        out,
        table(
            ("bucket class", "tokens", "q_max", "instructions>", "region calls>"),
            [
                (
                    bucket["name"],
                    "{}–{}".format(*bucket["tokens"]),
                    "any" if bucket["q_max"] is None else bucket["q_max"],
                    bucket["instructions"],
                    bucket["region_calls"],
                )
                for bucket in summary["buckets"]
            ],
        ),
    )
    out.print()
    print_table(
        out,
        facts(
            [
                ("executables", f"{summary['executables']} distinct"),
                ("nodes per provider", counts_text(summary["nodes_per_provider"])),
                ("size", ", ".join(f"{name} {size_text(size)}" for name, size in summary["bytes"].items())),
            ]
        ),
    )
    out.print()
    print_table(
        out,
        table(
            ("pass", "bucket", "leads to", "numerics", "matches>", "refusals>", "seconds>"),
            [
                (
                    one["name"] + _options_text(one["options"]),
                    trace_name(one["entry"], one["bucket"]) or "–",
                    one["stage"],
                    one["numerics"],
                    one["matches"],
                    one["refusals"],
                    "–" if one["seconds"] is None else f"{one['seconds']:.3f}",
                )
                for one in summary["passes"]
            ],
        ),
    )


def _target_text(target: dict[str, Any]) -> str:
    sm = f", sm {target['sm']}" if target.get("sm") is not None else ""
    features = " ".join(target.get("features") or ())
    return f"{target.get('name')} ({target.get('arch')}{sm}) {features}".rstrip()


def _options_text(options: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{name}={value}" for name, value in options.items()) + "}" if options else ""


def texts_of_pass(artifact: Artifact, name: str) -> dict[str, str]:
    """The program after the pass `name`: by bucket class, "" when it ran once for all, and by the stage that it led to
    when it ran on the way to several. Raises OptionError."""
    records = _passes(artifact)
    names = list(dict.fromkeys(record["name"] for record in records))
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        raise OptionError(
            f"no pass '{name}' ran",
            where="--pass",
            expected=", ".join(names),
            hint=f"the nearest is '{nearest[0]}'" if nearest else "",
        )
    runs = [(number, record) for number, record in enumerate(records, 1) if record["name"] == name]
    names = [_name(record) for _, record in runs]
    return {
        one if names.count(one) == 1 else f"{one} {record['stage']}".strip(): artifact.read_text(_file(number, record))
        for one, (number, record) in zip(names, runs, strict=True)
    }


def texts_of_stage(artifact: Artifact, name: str) -> dict[str, str]:
    """The program at the end of a stage: by bucket class, "" when it is one for all. Raises OptionError."""
    records = _passes(artifact)
    stages = list(dict.fromkeys([_TRACED, *(record["stage"] for record in records)]))
    wanted = name.upper()
    if wanted not in stages:
        raise OptionError(f"no program reached a stage '{name}'", where="--stage", expected=", ".join(stages))
    if wanted == _TRACED:
        return {"": artifact.read_text("trace/00-traced.ir")}
    if wanted == stages[-1]:
        return {"": artifact.read_text("program.ir")}  # of all bucket classes, one behind the other
    last = {_name(record): (number, record) for number, record in enumerate(records, 1) if record["stage"] == wanted}
    apart = {record["entry"] for _, record in last.values() if record["bucket"]}  # the stage ends for each class apart
    last = {name: (number, one) for name, (number, one) in last.items() if one["bucket"] or one["entry"] not in apart}
    return {bucket: _with_stage(artifact.read_text(_file(*one)), wanted) for bucket, one in last.items()}


def _with_stage(text: str, stage: str) -> str:
    """A trace shows the program as its pass left it, which is before the program was declared to be of the stage."""
    header, _, body = text.partition("\n")
    words = [f"stage={stage}" if word.startswith("stage=") else word for word in header.split(" ")]
    return " ".join(words) + "\n" + body


def _name(record: dict[str, Any]) -> str:
    return trace_name(record["entry"], record["bucket"])


def _file(number: int, record: dict[str, Any]) -> str:
    return trace_file(number, record["name"], record["entry"], record["bucket"])


def print_plan(artifact: Artifact) -> None:
    """The instructions of every bucket class, and the memory that they take."""
    plans = _plans(artifact)
    rows = [
        (
            name,
            index,
            _target_name(one.target),
            one.provider,
            ", ".join(
                [*map(_argument, one.args), *(f"{name}={_argument(value)}" for name, value in one.kwargs.items())]
            ),
            ", ".join([*(name or "–" for name in one.results), *(f"{name}!" for name in one.updates)]),
            ", ".join(one.frees),
        )
        for name, bucket in _buckets(plans)
        for index, one in enumerate(bucket.instructions)
    ]
    out = console()
    print_table(out, table(("bucket", "#>", "target", "provider", "arguments", "results", "frees"), rows))
    out.print()
    print_table(out, facts(memory_rows(plans)))
    out.print("\nname!: a state updated in place    –: a result that nothing uses", style="dim", markup=False)


def _target_name(target: str) -> str:
    return target[: len("exe.") + _EXE_SHOWN] if target.startswith("exe.") else target


def _argument(value: Argument) -> str:
    if isinstance(value, Ref):
        return f"%{value.ref}"
    if isinstance(value, DType):
        return value.dtype
    return repr(list(value) if isinstance(value, tuple) else value)


def print_weights(artifact: Artifact) -> None:
    """Every weight, where it lies and how it was made."""
    index: Any = artifact.read_json("weights.json")
    bytes_per_element = {"f64": 8, "i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2}  # the others have one
    rows, total = [], 0
    shown: dict[str, str] = {}
    try:
        for name, entry in index.items():
            size = bytes_per_element.get(entry["dtype"], 1)
            for extent in entry["shape"]:
                size *= extent
            if "same_as" in entry:
                place = f"same as {entry['same_as']}"
            elif "parts" in entry:
                place = ", ".join(f"{part['file']}@{part['offset']}" for part in entry["parts"])
                total += size * len(entry["parts"])
            else:
                place, total = f"{entry['file']}@{entry['offset']}", total + size
            recipe = _recipe_text(name, entry["recipe"], shown)
            rows.append((name, entry["dtype"], entry["shape"], size_text(size), place, recipe))
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"weights.json is malformed: {error!r}", where=str(artifact.folder)) from error
    out = console()
    print_table(out, table(("param", "dtype", "shape", "size>", "file@offset", "recipe"), rows))
    out.print(f"\n{len(rows)} params, {size_text(total)} resident", markup=False)


_OUTPUT = re.compile(r"(?<=\))\.(\w+)")


def _recipe_text(name: str, recipe: str, shown: dict[str, str]) -> str:
    """A recipe, or, where it takes other results of the same steps than one that was shown, which of them it takes.

    `shown` holds the first param of each recipe without the names of results.
    """
    steps, results = _OUTPUT.sub("", recipe), dict.fromkeys(_OUTPUT.findall(recipe))
    first = shown.setdefault(steps, name)
    return recipe if first == name or not results else f"{', '.join(results)} of the recipe of {first}"


def _buckets(plans: Plans) -> list[tuple[str, BucketPlan]]:
    """Every bucket class of every entry, and what it is called."""
    return [(trace_name(key, one.bucket.name), one) for key, plan in plans.plans.items() for one in plan.buckets]


def _plans(artifact: Artifact) -> Plans:
    try:
        return Plans.model_validate_json(artifact.read_text("plan.json"))
    except ValidationError as error:
        first = error.errors()[0]
        raise ArtifactError(
            f"plan.json, field {'.'.join(map(str, first['loc']))}: {first['msg']}", where=str(artifact.folder)
        ) from error


def _passes(artifact: Artifact) -> list[dict[str, Any]]:
    """The records of trace/passes.json, their fields checked."""
    records: Any = artifact.read_json("trace/passes.json")
    wanted = {"name", "entry", "bucket", "stage", "options", "numerics", "matches", "refusals"}
    if not isinstance(records, list) or not all(isinstance(one, dict) and wanted <= one.keys() for one in records):
        raise ArtifactError("trace/passes.json is malformed", where=str(artifact.folder))
    return records


def _pass_seconds(artifact: Artifact) -> dict[tuple[str, str, str | None], float]:
    """Seconds by pass, entry and bucket class; opening the artifact has compared the file with its checksum."""
    path = artifact.folder / TIMINGS
    try:
        timings: Any = parse_json(path.read_bytes()) if path.exists() else {"passes": []}
        return {(one["name"], one["entry"], one["bucket"]): float(one["seconds"]) for one in timings["passes"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{TIMINGS} is malformed: {error}", where=str(artifact.folder)) from error


def _sizes(artifact: Artifact) -> dict[str, int]:
    """Bytes by top-level folder; single files together as "other"."""
    sizes: dict[str, int] = {}
    for entry in artifact.manifest.files:
        folder, slash, _ = entry.path.partition("/")
        sizes[folder if slash else "other"] = sizes.get(folder if slash else "other", 0) + entry.size
    for name in UNLISTED:
        path = artifact.folder / name
        sizes["other"] = sizes.get("other", 0) + (path.stat().st_size if path.exists() else 0)
    return {**dict(sorted(sizes.items(), key=lambda item: -item[1])), "total": sum(sizes.values())}

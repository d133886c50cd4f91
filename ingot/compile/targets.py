"""Read the compile requests of a model for one target or several, one request for each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.compile.request import Request
from ingot.compile.timing.tuning_log import log_target
from ingot.ir.artifact.digest import digest_json
from ingot.ir.errors import OptionError, TargetError
from ingot.ir.machine.target import Target


def target_names(given: str) -> list[str]:
    """Return the names of the targets in `given`, such as "sm_90,cpu", in order.

    Raises TargetError for an unknown target, and OptionError for an empty list or a target that is there twice.
    """
    words = [word.strip() for word in given.split(",")]
    names = [Target.named(word).name for word in words]
    for index, name in enumerate(names):
        if name in names[:index]:
            same = words[names.index(name)]
            twice = (
                f"'{name}' twice" if same == words[index] else f"'{same}' and '{words[index]}', which are one target"
            )
            raise OptionError(f"the targets have {twice}", where="target", expected="each target once")
    return names


def read_requests(checkpoint: str | Path, **options: Any) -> list[Request]:
    """Return a compile request for each target of the option `target`, in order. `options` are those of `Request.read`.

    A tuning log applies to the request of its own target. `tune` applies to this machine's GPU. The requests share the
    opened checkpoint. Raises IngotError.
    """
    names = target_names(str(options.get("target", "auto")))
    if len(names) == 1:
        return [Request.read(checkpoint, **options)]
    if options.get("mesh"):
        raise OptionError("several targets with a mesh", where="target", expected="one target, or no mesh")
    log = options.pop("tuning_log", None)
    logged = None if log is None else log_target(log, names)
    if log is not None and logged not in names:
        raise TargetError(
            f"the tuning log is for {logged}, and this compile for {', '.join(names)}",
            where="tuning_log",
            expected="a log of a compile for one of them",
        )
    here = Target.detect("auto")
    tune = options.pop("tune", False)
    requests = [
        Request.read(
            checkpoint,
            **{
                **options,
                "target": name,
                "tuning_log": log if name == logged else None,
                # If none is this machine's GPU, every request refuses the option.
                "tune": tune and (name == here.name or here.name not in names or here.device == "cpu"),
            },
        )
        for name in names
    ]
    return [one.sharing(requests[0]) for one in requests]


def fat_key(keys: Mapping[str, str]) -> str:
    """Return the `request_key` of a fat artifact, from those of its variants by target. The order does not matter."""
    return digest_json({"variants": dict(keys)})

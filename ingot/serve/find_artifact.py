"""The artifact of a model: a folder, or a checkpoint's artifact, which is compiled once and found in the cache."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.error_text import decode_error
from ingot.hub.name import hub_name, is_there
from ingot.ir.artifact.manifest_file import VARIANTS, is_artifact
from ingot.ir.errors import ArtifactError, InternalError, OptionError
from ingot.runtime.module_command import module_command

_GGUF = ".gguf"


def find_artifact(
    model: str | Path, compile_options: Mapping[str, Any], quantized_by: Sequence[str] | None = None
) -> Path:
    """Return the path of the artifact of `model`: itself, or what a checkpoint folder, a GGUF file or a hub repository
    compiles to. Of a fat artifact it is the variant of this machine.

    A checkpoint is compiled with `compile_options` if the compile cache has no artifact of it. With `quantized_by`, a
    checkpoint that one of these methods quantized keeps its weights: the option `quantize` is for checkpoints of floats
    only. Raises IngotError if there is no such model, if it cannot be compiled, if another method quantized it, or if
    an artifact is given with compile options.
    """
    path = Path(model)
    if not is_artifact(path) and (_is_checkpoint(path) or hub_name(model) is not None):
        return _chosen(_compile_cached(model, compile_options, quantized_by))
    if not is_there(path):
        raise ArtifactError(
            f"{str(model)[:200]} is not there",
            expected="an artifact (NAME.ingot), a checkpoint folder, a GGUF file, or a hub repository, as in org/name",
            hint="check the path; `compile-model CHECKPOINT -o NAME.ingot` makes an artifact",
        )
    if compile_options:
        raise OptionError(
            f"an artifact takes no option '{next(iter(compile_options))}'",
            where=str(model),
            expected="options of compiling with a checkpoint only",
            hint=_compile_hint(compile_options),
        )
    return _chosen(path)


def _chosen(path: Path) -> Path:
    """Return the variant of this machine if `path` is a fat artifact, else `path`."""
    if not (path / VARIANTS).is_file():
        return path
    from ingot.runtime.loading.variants import variant_folder  # imports pydantic

    return variant_folder(path)


def _is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a folder with a config.json, a GGUF file, or a folder with GGUF files."""
    if path.suffix == _GGUF and path.is_file():
        return True
    return (path / "config.json").is_file() or (path.is_dir() and any(path.glob(f"*{_GGUF}")))


def _compile_hint(options: Mapping[str, Any]) -> str:
    """Return a hint how to make an artifact with options of compiling."""
    scheme = options.get("quantize")
    given = f" --quantize {scheme}" if isinstance(scheme, str) else ""
    return f"compile the checkpoint with it: compile-model CHECKPOINT -o NAME.ingot{given}"


def _compile_cached(
    checkpoint: str | Path, options: Mapping[str, Any], quantized_by: Sequence[str] | None = None
) -> Path:
    """Return the path of the cached artifact of a checkpoint. A child process looks it up, and compiles it if needed.

    `options` are keyword arguments of `compile_model`, and `quantized_by` is as in `find_artifact`. The child does the
    look-up too, because the compile cache's key (`request_key`) needs tracing. Raises the child's IngotError.
    """
    # The child takes a string that is no folder for a hub name; a Path is never a hub name.
    given = checkpoint if isinstance(checkpoint, str) else str(checkpoint.absolute())
    command = module_command("ingot.compile.cached", given, json.dumps(options))
    if quantized_by is not None:
        command.append(json.dumps(list(quantized_by)))
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    answer = child.stdout.strip().rpartition("\n")[2]
    try:
        reply = json.loads(answer)
    except ValueError:
        raise InternalError(f"the compiling process ended with status {child.returncode} and no answer") from None
    if "path" in reply:
        return Path(reply["path"])
    raise decode_error(reply["error"])

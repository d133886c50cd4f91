"""The child process of `LLM(checkpoint)`: find or compile the cached artifact, and print its path."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.cli.progress import OnProgress, live_progress
from ingot.compile.driver import compile_cached
from ingot.error_text import encode_error
from ingot.frontend.checkpoint import read_config
from ingot.frontend.quantized.readers import quant_method
from ingot.hub.source import find_source
from ingot.ir.errors import IngotError, OptionError


def main() -> None:
    checkpoint, options = sys.argv[1], json.loads(sys.argv[2])
    answer: dict[str, Any]
    try:
        with live_progress() as progress:
            if len(sys.argv) > 3:
                checkpoint, options = keep_quantized(checkpoint, options, json.loads(sys.argv[3]), progress)
            answer = {"path": str(compile_cached(checkpoint, progress=progress, **options))}
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        answer = {
            "error": encode_error(OptionError(str(error).partition("() ")[2], expected="an option of compile_model"))
        }
    except IngotError as error:
        answer = {"error": encode_error(error)}
    except KeyboardInterrupt:
        sys.exit(130)  # the parent was interrupted too, and reports it
    print(json.dumps(answer), flush=True)


def keep_quantized(
    checkpoint: str, options: Mapping[str, Any], methods: Sequence[str], progress: OnProgress
) -> tuple[str, dict[str, Any]]:
    """Return the checkpoint and the options to compile it with, without `quantize` if one of `methods` quantized it.

    A checkpoint on the hub is returned with its commit. Raises OptionError if another method quantized the checkpoint,
    or if it has floats and there is no option `quantize`.
    """
    source = find_source(checkpoint, options.get("revision"), progress)
    method = quant_method(read_config(source.folder))
    if method is None and "quantize" not in options:
        raise OptionError(
            "the checkpoint is not quantized",
            where=checkpoint,
            expected=f"weights that {' or '.join(methods)} quantized",
            hint="formats that Ingot rounds floats to: compile-model --quantize",
        )
    if method is not None and method not in methods:
        raise OptionError(
            f"the checkpoint is quantized by '{method}'",
            where=checkpoint,
            expected=" or ".join((*methods, "a checkpoint of floating point weights")),
            hint="leave the quantization out: quantized weights are read as they are",
        )
    left_out = {"revision"} if source.origin else set()
    if method is not None:
        left_out.add("quantize")
    return source.origin or checkpoint, {name: value for name, value in options.items() if name not in left_out}


if __name__ == "__main__":
    main()

"""The child process of `LLM(checkpoint)`: find or compile the cached artifact, and print its path."""

import json
import sys
from typing import Any

from ingot.cli.progress import live_progress
from ingot.compile.driver import compile_cached
from ingot.error_text import encode_error
from ingot.ir.errors import IngotError, OptionError


def main() -> None:
    checkpoint, options = sys.argv[1], json.loads(sys.argv[2])
    answer: dict[str, Any]
    try:
        with live_progress() as progress:
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


if __name__ == "__main__":
    main()

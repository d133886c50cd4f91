"""vLLM's `FlexibleArgumentParser`: options may be written with dashes or with underscores."""

import argparse
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that reads `--max_tokens` and `--max-tokens` as the same option."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        import sys

        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        return super().parse_known_args([*map(self._spelled, given[:end]), *given[end:]], namespace)

    def _spelled(self, argument: str) -> str:
        """Return an argument with the spelling of the option that this parser has. Other arguments are unchanged."""
        name, equals, value = argument.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return argument
        body = name.removeprefix("--")
        for spelling in (f"--{body.replace('_', '-')}", f"--{body.replace('-', '_')}"):
            if spelling in self._option_string_actions:
                return f"{spelling}{equals}{value}"
        return argument

"""Checks of grammars in a process of their own, which may crash or take too long."""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ingot.ir.errors import InternalError, RequestError
from ingot.runtime.grammar.limits import CHECK_SECONDS
from ingot.runtime.grammar.params import OWNER, StructuredOutputsParams
from ingot.runtime.line_process import START_SECONDS, LineProcess


class GrammarCheck:
    """Checks grammars in a worker process. Several threads may call `source`; calls run one at a time. The first one
    starts the process.

    tokenizer    the contents of tokenizer.json
    vocab_size   the model's vocabulary
    eos          the model's end tokens
    special      text -> id of special tokens
    seconds      the most time for one grammar
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos: Sequence[int],
        special: Mapping[str, int],
        seconds: float = CHECK_SECONDS,
    ) -> None:
        self._given = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos": list(eos), "special": dict(special)}
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: LineProcess | None = None

    def source(self, params: StructuredOutputsParams) -> str:
        """Return a grammar as text for LLMatcher, which compiles it without a fault. Raises RequestError for a bad
        grammar, also if its check crashes or takes too long. Later calls work after that."""
        line = json.dumps({"params": asdict(params), "seconds": self._seconds}).encode() + b"\n"
        with self._lock:
            process, self._process = self._process or self._started(), None  # one that fails is not used again
            try:
                reply = json.loads(process.ask(line, self._seconds))
            except TimeoutError:
                process.close()
                raise _too_complex(f"compiling it took longer than {self._seconds:g} s") from None
            except EOFError:
                process.close()
                raise _too_complex("compiling it needs too much memory, stack or time") from None
            except BaseException:
                process.close()
                raise
            self._process = process
        if "grammar" in reply:
            return str(reply["grammar"])
        raise _refusal(reply)

    def _started(self) -> LineProcess:
        process = LineProcess("ingot.runtime.grammar.worker", "the process that checks grammars")
        try:
            reply = json.loads(process.ask(json.dumps(self._given).encode() + b"\n", START_SECONDS))
        except (TimeoutError, EOFError):
            raise InternalError(f"the process that checks grammars failed, status {process.close()}") from None
        if reply:
            process.close()
            raise _refusal(reply)
        return process


def _refusal(reply: Mapping[str, str]) -> RequestError:
    return RequestError(reply["error"], where=reply["where"], expected=reply["expected"])


def _too_complex(what: str) -> RequestError:
    return RequestError(
        f"the grammar is too complex: {what}",
        where=OWNER,
        expected="a smaller grammar",
        hint="chains of thousands of rules or references, and nested repetitions, are the usual reasons",
    )

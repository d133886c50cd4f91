"""The compiled grammars of a model: each is checked, compiled once, and kept for later requests."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.check import GrammarCheck
from ingot.runtime.grammar.params import StructuredOutputsParams
from ingot.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

# Compiled grammars that are kept, those used last. A grammar of usual size takes some hundred kilobytes.
_KEPT = 64
# Compiling recurses as deep as a grammar; the process that checks grammars has 8 MB. Only used pages take memory.
_STACK_BYTES = 64 << 20


class Grammars:
    """The grammars of a model. The tokenizer and the checking process are set up at the first grammar.

    tokenizer    the model's tokenizer; None: grammars are refused
    vocab_size   the size of the model's vocabulary
    eos          the model's end tokens
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos: Collection[int]) -> None:
        self._given = tokenizer
        self._vocab_size = max(vocab_size, 0 if tokenizer is None else tokenizer.vocab_size)
        self._eos = sorted(eos)
        self._compiled: OrderedDict[StructuredOutputsParams, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def words(self) -> int:
        """Return how many i32 words a mask has. The vocabulary of the tokenizer may exceed that of the model."""
        return -(-self._vocab_size // 32)

    @property
    def surplus(self) -> list[int]:
        """Return the end tokens of llguidance's tokenizer that are none of the model's. It has at least one itself."""
        return sorted(set(self._tokenizer.eos_tokens) - set(self._eos))

    def matcher(self, params: StructuredOutputsParams) -> "llguidance.LLMatcher":
        """Return a new matcher at the start of a grammar. Compiles the grammar, or copies it if it is kept.

        Raises RequestError if the grammar is refused.
        """
        with self._lock:
            kept = self._compiled.get(params)
            if kept is not None:
                self._compiled.move_to_end(params)
                return kept.deep_copy()
        return self.prepare(params).result().deep_copy()

    def has(self, params: StructuredOutputsParams) -> bool:
        """Return whether a grammar is kept, so that `matcher` takes no time."""
        with self._lock:
            return params in self._compiled

    def prepare(
        self, params: StructuredOutputsParams, then: Callable[[], None] | None = None
    ) -> "Future[llguidance.LLMatcher]":
        """Compile a grammar in another thread, and keep it. `then` is called in that thread at the end."""
        future = self._threads.submit(self._compile, params)
        if then is not None:
            future.add_done_callback(lambda _: then())
        return future

    def _compile(self, params: StructuredOutputsParams) -> "llguidance.LLMatcher":
        from ingot.runtime.grammar.compiling import compiled

        found = compiled(self._tokenizer, self._check.source(params))
        with self._lock:
            self._compiled[params] = found
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found

    @cached_property
    def _text(self) -> str:
        """Return the contents of a tokenizer.json."""
        if self._given is None:
            raise RequestError(
                "a grammar for a model without a tokenizer",
                where="SamplingParams.structured_outputs",
                expected="an artifact with a tokenizer",
            )
        text: str = self._given.backend.to_str()
        return text

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        from ingot.runtime.grammar.compiling import make_tokenizer

        return make_tokenizer(self._text, self._vocab_size, self._eos)

    @cached_property
    def _check(self) -> GrammarCheck:
        text = self._text
        assert self._given is not None
        return GrammarCheck(text, self._vocab_size, self._eos, self._given.special_tokens)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Return the thread that compiles. With one, a slow grammar delays others, but no step."""
        before = threading.stack_size(_STACK_BYTES)
        try:
            pool = ThreadPoolExecutor(1, thread_name_prefix="ingot-grammar")
            pool.submit(int).result()  # starts the thread now, with this stack
        finally:
            threading.stack_size(before)
        return pool

"""Calls of llguidance that compile grammars, for the process that checks them and the one that uses them."""

import re
from collections.abc import Sequence

import llguidance
import numpy as np

from ingot.ir.errors import RequestError
from ingot.runtime.grammar.limits import parser_limits

_WHERE = "StructuredOutputsParams"
_MESSAGE_CHARACTERS = 400


def make_tokenizer(text: str, vocab_size: int, eos: Sequence[int]) -> llguidance.LLTokenizer:
    """Return llguidance's tokenizer for the contents `text` of a tokenizer.json.

    vocab_size   the model's vocabulary, at least the tokenizer's
    eos          the model's end tokens; empty: one that llguidance finds

    Raises RequestError for a kind of tokenizer that llguidance does not support.
    """
    try:
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos) or None)
    except Exception as error:  # the library raises plain exceptions
        raise RequestError(
            f"grammars do not support this model's tokenizer: {error}"[:_MESSAGE_CHARACTERS],
            where="structured_outputs",
            expected="a model with another tokenizer, or no grammar",
        ) from None


def compiled(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """Return a matcher at the start of a grammar, from `ingot.runtime.grammar.source.source_of`.

    Raises RequestError if the grammar is malformed, has parts that are not supported, or exceeds a limit.
    """
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise bad_grammar(matcher.get_error())
    return matcher


def mask_of(tokenizer: llguidance.LLTokenizer, matcher: llguidance.LLMatcher) -> np.ndarray:
    """Return the tokens that may come next, as bits in i32[ceil(vocab / 32)].

    Raises RequestError if there are none, or if the grammar exceeds a limit here.
    """
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if matcher.is_error():
        raise bad_grammar(matcher.get_error())
    if not mask.any() and not matcher.is_accepting():
        raise bad_grammar("no token may come next")
    return mask


def bad_grammar(message: str) -> RequestError:
    """Return the error for a message of llguidance about a grammar."""
    return RequestError(
        f"the grammar is refused: {readable(message)}",
        where=_WHERE,
        expected="a grammar that some text matches, within llguidance's features and limits",
    )


def readable(message: str) -> str:
    """Return a message of llguidance in one line, without excerpts of the grammar and states of the parser."""
    if message.startswith("NoExtension"):
        return "no text matches it, or none from here on"
    message = message.partition("<state>")[0].replace("<non-verbose/>", "")
    message = re.sub(r"^at \d+\(\d+\): ", "", re.sub(r"(?m)^ *\d+ \|.*$|^ *\| *\^.*$", "", message))
    return " ".join(message.split())[:_MESSAGE_CHARACTERS]

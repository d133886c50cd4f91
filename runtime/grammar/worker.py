"""The process that checks grammars: one JSON request per line on stdin, one JSON answer per line on stdout.

A grammar comes from a request. Compiling one may crash: a chain of thousands of rules overflows the stack of
llguidance, version 1.9. So each new grammar is compiled here first, and then in the process that uses it.

The first request is {"tokenizer": contents of tokenizer.json, "vocab_size": n, "eos": [ids], "special": {text: id}}.
The answer is {}, or an error. Later requests are {"params": fields of StructuredOutputsParams, "seconds": cap on CPU
time}. The answer is {"grammar": text for LLMatcher}, or {"error": text, "where": text, "expected": text}.
"""

import json
import os
import resource
import sys
import threading
from collections.abc import Mapping
from typing import Any

import llguidance

from ingot.ir.errors import RequestError
from ingot.runtime.chat.worker import limit_cpu, write
from ingot.runtime.grammar.compiling import compiled, make_tokenizer, mask_of
from ingot.runtime.grammar.params import StructuredOutputsParams
from ingot.runtime.grammar.source import source_of

# Address space. A vocabulary of 256,000 tokens takes some 200 MB, and the slowest grammars of the tests 300 MB.
_MEMORY_BYTES = 4 << 30
# Less than the threads have that compute masks while serving (2 MB, the default of Rust's threads), so that a grammar
# that overflows their stack does so here.
_STACK_BYTES = 1 << 20


def checked(
    tokenizer: "llguidance.LLTokenizer", special: Mapping[str, int], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answer for one grammar: compile it, and compute the mask of its first token."""
    try:
        source = source_of(StructuredOutputsParams(**fields), special)
        matcher = compiled(tokenizer, source)
        found: list[BaseException] = []
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_first_mask, args=(tokenizer, matcher, found))
        thread.start()
        thread.join()
        if found:
            raise found[0]
    except RequestError as error:
        return _refusal(error)
    return {"grammar": source}


def _refusal(error: RequestError) -> dict[str, Any]:
    return {"error": error.what, "where": error.where, "expected": error.expected}


def _first_mask(
    tokenizer: "llguidance.LLTokenizer", matcher: "llguidance.LLMatcher", found: list[BaseException]
) -> None:
    try:
        mask_of(tokenizer, matcher)
    except RequestError as error:
        found.append(error)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints must not mix with the answers
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write(replies, {"ready": True})
    given = json.loads(sys.stdin.buffer.readline())
    try:
        tokenizer = make_tokenizer(given["tokenizer"], given["vocab_size"], given["eos"])
    except RequestError as error:
        write(replies, _refusal(error))
        return
    write(replies, {})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        limit_cpu(request["seconds"])
        write(replies, checked(tokenizer, given["special"], request["params"]))


if __name__ == "__main__":
    main()

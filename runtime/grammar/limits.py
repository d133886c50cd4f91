"""Limits on grammars, so that a hostile one ends with an error after a bounded time."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Fuel for building regular expressions, and the most of them in a lexer. With llguidance's 1,000,000, the first mask of
# (a{1000}){1000} fails after 1.2 to 1.9 s; with this number after 0.13 s (one core of a server). Schemas with an
# enumeration of 20,000 texts or 1000 properties need less.
_LEXER_FUEL = 250_000
# Symbols of a grammar; compiling the largest takes a second. A schema whose size doubles with each level reaches it.
_GRAMMAR_SIZE = 100_000
# States of a lexer take 1 to 2 kB each (llguidance's documentation of LLParserLimits).
_LEXER_STATES = 50_000
# The most time for the check of a grammar in its process. The slowest grammars within the limits above take 1.2 s.
CHECK_SECONDS = 5.0
# The most CPU time for those masks of one sequence that take longer than FAST_SECONDS each. Then it ends with an error.
SLOW_SECONDS = 1.0
# Usual masks take 50 us, and fewer than one in a hundred more than 1 ms (llguidance's README). Steps take some
# milliseconds.
FAST_SECONDS = 0.005


def parser_limits() -> "LLParserLimits":
    """Return llguidance's limits for the grammar of a request."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL,
        max_grammar_size=_GRAMMAR_SIZE,
        max_lexer_states=_LEXER_STATES,
        verbose_errors=False,  # they would have the output so far
    )

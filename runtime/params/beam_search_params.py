"""`BeamSearchParams`: options of `LLM.beam_search`. Names and defaults are vLLM's."""

from dataclasses import dataclass, fields

from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.runtime.params.param_checks import boolean, integer, real
from ingot.runtime.params.sampling_checks import CHECKS

# A step lists twice as many tokens of each beam: if half of them end it, there are still enough to continue.
CANDIDATES_PER_BEAM = 2
MAX_BEAM_WIDTH = MAX_LOGPROBS // CANDIDATES_PER_BEAM
# Lengths to the power of this are finite in float64 up to 2**64 tokens.
_MAX_LENGTH_PENALTY = 16.0

_CHECKS = {
    "beam_width": integer(1, MAX_BEAM_WIDTH),
    "max_tokens": integer(1),
    "ignore_eos": boolean,
    "temperature": CHECKS["temperature"],
    "length_penalty": real(-_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY, "a number in [-16, 16]"),
    "include_stop_str_in_output": boolean,
}


@dataclass(frozen=True)
class BeamSearchParams:
    """Options of a beam search. The constructor checks them, and raises RequestError; instances are frozen.

    beam_width        beams that are continued, and sequences that are returned, 1..10
    max_tokens        >= 1: the most tokens that a beam generates
    ignore_eos        continue after the model's end tokens
    temperature       above 0: each beam also continues with a token that is sampled at this temperature, if it is not
                      among the likely ones. Log-probabilities do not depend on it
    length_penalty    a beam's score is the sum of its tokens' log-probabilities, divided by its number of tokens, those
                      of the prompt included, to this power
    include_stop_str_in_output
                      include an end token in `text`; `tokens` has it in any case
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            checked = _CHECKS[one.name](f"BeamSearchParams.{one.name}", getattr(self, one.name))
            object.__setattr__(self, one.name, checked)

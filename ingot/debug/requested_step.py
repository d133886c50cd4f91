"""The step shape that `--step` of `ingot explain` requests: parse it, check it, and complete it with defaults."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.debug.explained import StepShape
from ingot.ir.artifact.plan import FEW_TOKENS, BucketClass
from ingot.ir.errors import ArtifactError, OptionError
from ingot.ir.mesh import with_rank_rows
from ingot.ir.program import Program
from ingot.runtime.loading.artifact import Artifact

# Defaults, within the limits: a typical prefill chunk of servers, and a context that is long enough to matter in
# attention. A sequence with more tokens in the step has a longer context.
_PROMPT_TOKENS = 512
_CONTEXT = 1024
_OPTION = "--step"
_FIELDS = {"T": "tokens", "B": "sequences", "context": "context"}
_EXPECTED = "as in T=32,context=512: T tokens of B sequences, and the positions that each then has"


@dataclass(frozen=True)
class StepLimits:
    """The limits of an artifact's steps, in tokens or sequences.

    max_seq_len   tokens of a sequence
    max_batch     sequences in a step
    page_size     tokens in a page of the KV cache
    max_tokens    tokens in a step
    """

    max_seq_len: int
    max_batch: int
    page_size: int
    max_tokens: int


@dataclass(frozen=True)
class RequestedStep:
    """The step shape that a user requests with `--step`. A field that is None gets a default.

    The step's `tokens` are spread evenly over `sequences`. Each sequence has `context` cached positions after the step,
    and shares no pages.

    By default, each sequence of a step of up to 16 tokens has one token. This is also the default in all bucket classes
    (ranges of step sizes) except the largest. Any other step has as few sequences as can hold its tokens.
    """

    tokens: int | None = None
    sequences: int | None = None
    context: int | None = None

    def check(self, limits: StepLimits) -> None:
        """Raise OptionError if a requested number is below 1 or above the artifact's limit.

        The context and the number of sequences are checked.
        """
        if self.context is not None:
            _check("the context is", self.context, limits.max_seq_len, "max_seq_len")
        if self.sequences is not None:
            _check("the sequences are", self.sequences, limits.max_batch, "max_batch")

    @staticmethod
    def parse(text: str) -> "RequestedStep":
        """Parse the argument of `--step`, such as "T=32,B=8,context=512". Raises OptionError if it is malformed."""
        values: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in _FIELDS or not re.fullmatch(r"[0-9]{1,9}", value) or _FIELDS[name] in values:
                raise OptionError(f"'{part:.80}' is not part of a step", where=_OPTION, expected=_EXPECTED)
            values[_FIELDS[name]] = int(value)
        return RequestedStep(**values)

    def in_class(self, bucket: BucketClass) -> bool:
        """Return whether the requested step belongs to the bucket class `bucket`, a range of step sizes.

        True if no number of tokens is requested. If no number of sequences is requested, each sequence has one token.
        """
        if self.tokens is None:
            return True
        most = 1 if self.sequences is None else math.ceil(self.tokens / self.sequences)
        return bucket.holds(self.tokens, most)

    def step(self, bucket: BucketClass, limits: StepLimits, timed: tuple[int, ...] = ()) -> StepShape:
        """Return the requested step shape, with defaults for the bucket class `bucket` (a range of step sizes).

        The golden run, a short run at the end of the compile, has timed some steps. `timed` has their numbers of
        tokens, which become a part of the result. Raises OptionError for a step that the artifact cannot run.
        """
        each = math.ceil((self.tokens or 0) / (self.sequences or limits.max_batch))
        cached = self.context or min(limits.max_seq_len, max(_CONTEXT, each))
        one_each = bucket.q_max == 1 or bucket.tokens[1] < limits.max_tokens
        fed = self.tokens or _default_tokens(bucket, one_each=one_each)
        if self.sequences is not None:
            sequences = self.sequences
        elif one_each or fed <= FEW_TOKENS:
            sequences = min(fed, limits.max_batch)
        else:
            sequences = min(limits.max_batch, math.ceil(fed / cached))
        if self.tokens is None:
            fed = min(fed, sequences * cached)
        if not sequences <= fed <= sequences * cached:
            raise OptionError(
                f"{sequences} sequences of {cached} positions cannot have {fed} tokens",
                where=_OPTION,
                expected=f"{sequences} to {sequences * cached} tokens, or another context",
            )
        return StepShape(fed, sequences, cached, timed)


def serving(step: StepShape, classes: Sequence[BucketClass]) -> BucketClass | None:
    """Return the bucket class (a range of step sizes) in which `step` runs.

    It is the first of `classes` that includes the step; None if there is none.
    """
    most = math.ceil(step.tokens / step.sequences)
    return next((one for one in classes if one.holds(step.tokens, most)), None)


def step_sizes(step: StepShape, program: Program, page_size: int) -> Mapping[str, int]:
    """Return the sizes of symbolic dims in a step, such as T for its tokens and B for its sequences.

    Each sequence gets one row of logits, so L equals B.
    """
    pages = step.pages(page_size)
    rows = program.dims["R"].hi if "R" in program.dims else 1
    sizes = {"T": step.tokens, "B": step.sequences, "L": step.sequences, "P": pages // step.sequences}
    sizes = {**sizes, "R": rows, "S": step.sequences, "pages": pages, "G": 1}
    return with_rank_rows(sizes, program.mesh)


def limits_of(artifact: Artifact) -> StepLimits:
    """Read the limits of an artifact's steps from its manifest.

    Raises ArtifactError if a limit is missing or below 1.
    """
    names = ("max_seq_len", "max_batch", "page_size", "max_tokens")
    return StepLimits(*(_limit(artifact, name) for name in names))


def _limit(artifact: Artifact, name: str) -> int:
    value = artifact.manifest.model.get(name)
    if not isinstance(value, int) or value < 1:
        raise ArtifactError(f"the limit {name} is {value!r:.80}", where="manifest.json, model", expected="a number")
    return value


def _check(what: str, value: int, most: int, limit: str) -> None:
    if not 1 <= value <= most:
        raise OptionError(f"{what} {value}", where=_OPTION, expected=f"1 to {most}, {limit}")


def _default_tokens(bucket: BucketClass, *, one_each: bool) -> int:
    if one_each or bucket.few_tokens:
        return bucket.tokens[1]
    return max(bucket.tokens[0], min(bucket.tokens[1], _PROMPT_TOKENS))

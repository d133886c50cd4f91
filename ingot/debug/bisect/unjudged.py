"""Refuse to bisect entries with outputs that cannot be compared, and say why.

Programs are compared by the logits of one token after another, each sampled from the previous logits. An entry that
accepts or rejects several tokens in a step does not run this way.
"""

from ingot.ir.errors import OptionError
from ingot.ir.features import POOL, find_ending, find_input
from ingot.ir.granule import granule_of
from ingot.ir.program import Program

_SAMPLES = "an artifact whose entries sample one token of a sequence in each step"
_BY_NUMERICS = "compile with check_numerics, which measures every pass"
_BY_VERIFY = "`ingot verify` checks that it computes what it did when it was compiled"


def refuse_unjudged(program: Program, where: str) -> None:
    """Raise OptionError if bisecting cannot compare the outputs of a program, for example because it returns no logits.

    `program` is the traced program of an entry, such as `main`. `where` names the artifact in the error.
    """
    if found := _reason(program):
        reason, hint = found
        raise OptionError(f"the entry '{program.name}' {reason}", where=where, expected=_SAMPLES, hint=hint)


def _reason(program: Program) -> tuple[str, str] | None:
    """Return why bisecting cannot compare the outputs of `program`; None if it can.

    The reason is a pair of texts: what the entry does, and which check works for it instead.
    """
    ending = find_ending(program.ending.name)
    if ending.name == POOL.name:
        return "makes vectors, and programs are judged by their logits", _BY_NUMERICS
    unknown = [name for name in program.input_types() if find_input(name) is None]
    if "logits" not in program.outputs or unknown:
        given = f"reads {', '.join(unknown)}" if unknown else "gives no logits"
        return f"has the ending '{ending.name}' and {given}; programs are judged by logits of tokens", _BY_VERIFY
    if (most := ending.fed(program.ending)) > 1:
        fed = f"up to {most} tokens of a sequence in a decode step"
        return f"has the ending '{ending.name}', which feeds {fed}, and bisecting feeds one", _BY_NUMERICS
    if granule_of(program) > 1:
        return "has tokens that see what is fed after them, and bisecting feeds one in each step", _BY_NUMERICS
    return None

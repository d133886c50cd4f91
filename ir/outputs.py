"""Which type an output may have where another one is declared."""

from ingot.ir.types import TensorType, ValueType

# What reads these computes in float32 whatever it is given; every other output is read as what it is declared to be.
_NARROWED = frozenset({"logits"})


def may_stand_for(given: ValueType, declared: ValueType, output: str) -> bool:
    """Whether the output of that name may be `given`: as declared, or logits as narrow as their numbers are."""
    if output in _NARROWED and isinstance(given, TensorType) and isinstance(declared, TensorType):
        return declared.holds(given)
    return given == declared

"""The output types that are accepted in place of the declared ones."""

from ingot.ir.types import TensorType, ValueType

# Readers of these outputs compute in float32 for any input dtype. Every other output is read with its declared type.
_NARROWED = frozenset({"logits"})


def may_stand_for(given: ValueType, declared: ValueType, output: str) -> bool:
    """Return whether an output may have the type `given`: the declared one, or for logits a narrower dtype that the
    declared one represents exactly."""
    if output in _NARROWED and isinstance(given, TensorType) and isinstance(declared, TensorType):
        return declared.holds(given)
    return given == declared

"""The types that an output of a program may have in place of its declared type."""

from ingot.ir.types import TensorType, ValueType

# Readers of these outputs compute in float32 for any input dtype. Every other output is read with its declared type.
_NARROWED = frozenset({"logits"})


def may_stand_for(given: ValueType, declared: ValueType, output: str) -> bool:
    """Return whether a program may return a value of type `given` for the output `output` of type `declared`.

    Usually the types must be equal. The output "logits" may also have a narrower dtype, if the declared dtype
    represents it exactly.
    """
    if output in _NARROWED and isinstance(given, TensorType) and isinstance(declared, TensorType):
        return declared.holds(given)
    return given == declared

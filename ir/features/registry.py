"""The registry of features and endings, and of their step inputs by name."""

from collections.abc import Iterable, Mapping

from ingot.ir.cache.groups import group_of_input
from ingot.ir.errors import InternalError, VerifyError
from ingot.ir.features.adapters import ADAPTERS
from ingot.ir.features.blocks import BLOCKS
from ingot.ir.features.drafts import DRAFTS, HIDDEN, PROPOSALS
from ingot.ir.features.feature import Ending, Feature
from ingot.ir.features.logit_edits import EDITS
from ingot.ir.features.logprobs import LOGPROBS
from ingot.ir.features.paging import PAGING, paging_of
from ingot.ir.features.penalties import BANS, PENALTIES
from ingot.ir.features.pooling import POOLING
from ingot.ir.features.sampling import SAMPLING
from ingot.ir.features.sequences import LOGIT_ROWS, SEQUENCES
from ingot.ir.features.sharing import SHARING
from ingot.ir.features.slots import SLOTS
from ingot.ir.features.step_input import RowTable, ServedParam, StepInput
from ingot.ir.features.tree import TREE, TREE_POSITIONS, TREE_PROPOSALS

FEATURES: dict[str, Feature] = {}
ENDINGS: dict[str, Ending] = {}
_INPUTS: dict[str, tuple[StepInput, Feature]] = {}


def register_feature(feature: Feature) -> Feature:
    """Register a feature, which is an ability such as penalties, and its step inputs by name.

    Raises InternalError if a name is taken or an input's type is not supported.
    """
    if feature.name in FEATURES:
        raise InternalError(f"the feature '{feature.name}' is defined twice")
    for one in feature.inputs:
        if one.name in _INPUTS:
            raise InternalError(f"the step input '{one.name}' is declared twice", where=f"feature {feature.name}")
        if one.dim not in ("T", "B", "L", "G"):
            raise InternalError(f"the step input '{one.name}' is {one.type}", expected="T, B, L or G as the first axis")
        if one.late and one.type.dtype.itemsize != 4:
            raise InternalError(f"the late step input '{one.name}' is {one.type}", expected="elements of 4 bytes")
    FEATURES[feature.name] = feature
    _INPUTS.update({one.name: (one, feature) for one in feature.inputs})
    return feature


def forget_feature(name: str) -> None:
    """Remove a feature (such as penalties) and its step inputs from the registry, after the test that defined it."""
    for one in FEATURES.pop(name).inputs:
        del _INPUTS[one.name]


def register_ending(ending: Ending) -> Ending:
    """Register an ending by name. An ending is what a program does with the model's outputs, such as sampling.

    Raises InternalError if the name is taken, or if the ending names an unknown feature.
    """
    if ending.name in ENDINGS:
        raise InternalError(f"the ending '{ending.name}' is defined twice")
    if unknown := [name for name in ending.features if name not in FEATURES]:
        raise InternalError(f"the ending '{ending.name}' has the unknown feature '{unknown[0]}'")
    ENDINGS[ending.name] = ending
    return ending


def forget_ending(name: str) -> None:
    """Remove an ending (such as "sample") from the registry, after the test that defined it."""
    del ENDINGS[name]


def find_ending(name: str) -> Ending:
    """Return the ending with this name, such as "sample". Raises VerifyError if it is unknown."""
    if name not in ENDINGS:
        raise VerifyError(f"unknown ending '{name}'", expected=", ".join(ENDINGS))
    return ENDINGS[name]


def find_feature(name: str) -> Feature:
    """Return the feature with this name, such as "penalties". Raises VerifyError if it is unknown."""
    if name not in FEATURES:
        raise VerifyError(f"unknown feature '{name}'", expected=", ".join(FEATURES))
    return FEATURES[name]


def step_inputs() -> Mapping[str, StepInput]:
    """Return all registered step inputs by name.

    Page tables and cache slots of windows and chunks are not registered, because their names depend on the model.
    """
    return {name: one for name, (one, _) in _INPUTS.items()}


def find_input(name: str) -> StepInput | None:
    """Return the step input of this name; None if no feature (such as penalties) declares it."""
    found = _found(name)
    return found[0] if found else None


def _found(name: str) -> tuple[StepInput, Feature] | None:
    """Return the step input `name`, and the feature (such as penalties) that declares it; None if there is none."""
    if name in _INPUTS:
        return _INPUTS[name]
    if (group := group_of_input(name)) is None:
        return None
    feature = paging_of(group)
    return next((one, feature) for one in feature.inputs if one.name == name)


def _owned(name: str) -> tuple[StepInput, Feature]:
    """Return the step input `name`, and the feature (such as penalties) that declares it.

    Raises InternalError if no feature declares it.
    """
    found = _found(name)
    if found is None:
        raise InternalError(f"no feature declares the step input '{name}'", expected=", ".join(_INPUTS))
    return found


def features_of(inputs: Iterable[str]) -> tuple[Feature, ...]:
    """Return the features that declare these step inputs, each once. A feature is an ability such as penalties.

    Raises InternalError for an input that no feature declares.
    """
    return tuple({feature.name: feature for name in inputs for feature in (_owned(name)[1],)}.values())


def unserved_params(inputs: Iterable[str]) -> tuple[ServedParam, ...]:
    """Return the sampling parameters that a program with the step inputs `inputs` does not support.

    They need a step input that the program lacks. The runtime rejects requests that use them.
    """
    taken = frozenset(inputs)
    served = {param.name for name in taken for param in _owned(name)[0].serves}
    others = (param for name, (one, _) in _INPUTS.items() if name not in taken for param in one.serves)
    return tuple(param for param in others if param.name not in served)


def row_tables(inputs: Iterable[str]) -> tuple[RowTable, ...]:
    """Return the tables of request values, such as temperatures, from which the host fills the step inputs `inputs`.

    A table has a row per running sequence.
    """
    names = tuple(inputs)
    own = [one.table for name in names if (one := _owned(name)[0]).table is not None]
    return (*own, *(table for feature in features_of(names) for table in feature.tables))


_SAMPLED = (SAMPLING, PENALTIES, BANS, EDITS, LOGPROBS)
for _feature in (
    *(SEQUENCES, LOGIT_ROWS, PAGING, SHARING, SLOTS, *_SAMPLED),
    ADAPTERS,
    *(DRAFTS, HIDDEN, PROPOSALS, TREE, TREE_POSITIONS, TREE_PROPOSALS, BLOCKS, POOLING),
):
    register_feature(_feature)

"""Features and endings: the step inputs and per-sequence states of a program, and what is done with its outputs."""

from ingot.ir.features.by_hand import FedSequence, fed_of, step_values, turn_of
from ingot.ir.features.endings import POOL, feeds_whole  # this import registers all of them
from ingot.ir.features.feature import Attribute, Ending, EndingUse, Feature, OpCall, Output, RowState
from ingot.ir.features.fed import Fed, PromptLogprobRows
from ingot.ir.features.registry import (
    ENDINGS,
    FEATURES,
    features_of,
    find_ending,
    find_feature,
    find_input,
    register_ending,
    register_feature,
    row_tables,
    step_inputs,
    unserved_params,
)
from ingot.ir.features.step_input import RowTable, ServedParam, StepInput, one_of, request_input

__all__ = [
    "ENDINGS",
    "FEATURES",
    "POOL",
    "Attribute",
    "Ending",
    "EndingUse",
    "Feature",
    "Fed",
    "FedSequence",
    "OpCall",
    "Output",
    "PromptLogprobRows",
    "RowState",
    "RowTable",
    "ServedParam",
    "StepInput",
    "features_of",
    "fed_of",
    "feeds_whole",
    "find_ending",
    "find_feature",
    "find_input",
    "one_of",
    "register_ending",
    "register_feature",
    "request_input",
    "row_tables",
    "step_inputs",
    "step_values",
    "turn_of",
    "unserved_params",
]

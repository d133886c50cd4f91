"""The feature of logit edits: biases, allowed tokens and bad words of a request, and tokens that a grammar allows."""

import torch

from ingot.ir.features.feature import Feature, RowState
from ingot.ir.features.request_view import RequestView
from ingot.ir.features.step_input import ServedParam, request_input
from ingot.ir.types import TensorType


def _edit_row(sequence: RequestView) -> int | None:
    return sequence.row if sequence.params.edits_logits else None


# The host writes a row of `edits` before the first step that samples for the sequence
# (`ingot.runtime.params.logit_edits`), and not step by step: most requests have no edits, and a row has thousands of
# words. Only for sequences with a grammar does it write the allowed tokens before each ending
# (`ingot.runtime.grammar.masks`).
EDITS = Feature(
    "edits",
    inputs=(
        request_input(  # the row of states with the edits of a row of logits; -1: no edits
            "edit_rows",
            TensorType(torch.int32, ("L",)),
            -1,
            _edit_row,
            serves=(
                ServedParam("logit_bias", None),
                ServedParam("allowed_token_ids", None),
                ServedParam("bad_words", ()),
                ServedParam("structured_outputs", None),
            ),
        ),
    ),
    rows=(RowState("edits", torch.int32, ("edit_words",)),),
)

"""The step inputs of tokens, sequences and rows of logits."""

import torch

from ingot.ir.features.feature import Feature, OpCall, RowState
from ingot.ir.features.fed import Fed
from ingot.ir.features.request_view import Array
from ingot.ir.features.step_input import StepInput
from ingot.ir.types import Size, TensorType


def _ints(*shape: Size) -> TensorType:
    return TensorType(torch.int32, shape)


def _tokens(array: Array, fed: Fed) -> None:
    array[:] = fed.tokens


def _token_seqs(array: Array, fed: Fed) -> None:
    array[:] = fed.seqs


def _q_starts(array: Array, fed: Fed) -> None:
    array[:] = fed.ends - fed.lengths


def _q_lens(array: Array, fed: Fed) -> None:
    array[:] = fed.lengths


def _rows(array: Array, fed: Fed) -> None:
    array[:] = fed.rows


def _starts(array: Array, fed: Fed) -> None:
    array[:] = fed.starts


def _positions(array: Array, fed: Fed) -> None:
    array[:] = fed.positions


def _logit_rows(array: Array, fed: Fed) -> None:
    array[:] = fed.logit_rows


def _sample_index(array: Array, fed: Fed) -> None:
    array[:] = fed.sample_index


SEQUENCES = Feature(
    "sequences",
    inputs=(
        StepInput("tokens", _ints("T"), 0, _tokens),  # -1: the row's last token, not yet known to the host
        StepInput("token_seqs", _ints("T"), -1, _token_seqs),  # index of its sequence, 0..B-1
        StepInput("positions", _ints("T"), 0, _positions, known=False),
        StepInput("q_starts", _ints("B"), 0, _q_starts),  # index in T of its first token
        StepInput("q_lens", _ints("B"), 0, _q_lens),  # the number of its tokens in the step
        StepInput("rows", _ints("B"), -1, _rows),  # its device row, 0..max_batch-1
        StepInput("starts", _ints("B"), 0, _starts),  # position of its first token; -1: the device's
    ),
    rows=(RowState("last_token", torch.int32), RowState("position", torch.int32)),
    before=(OpCall("feed", ("tokens", "positions", "slots", "kv_lens")),),
)

# For endings that sample tokens from logits.
LOGIT_ROWS = Feature(
    "logit_rows",
    inputs=(
        StepInput("logit_rows", _ints("L"), 0, _logit_rows),  # indices into T
        StepInput("sample_index", _ints("B"), -1, _sample_index),  # its logit row, 0..L-1; -1: no token is sampled
    ),
)

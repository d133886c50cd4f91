"""The endings: what a program does after the model's computation, such as sampling, verifying drafts or pooling."""

from collections.abc import Mapping

import torch

from ingot.ir.features.feature import Attribute, Ending, EndingUse, OpCall, Output
from ingot.ir.features.registry import register_ending
from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.ir.types import TensorType

_SCORES = ("logprob_ids", "logprobs", "ranks")
_WIDTH = 1 + MAX_LOGPROBS  # the chosen token, then the most likely ones
_TOKENS = Output("tokens", "sampled", TensorType(torch.int32, ("L",)), read=True)
_LOGPROBS = (
    Output("logprob_ids", "logprob_ids", TensorType(torch.int32, ("L", _WIDTH))),
    Output("logprobs", "logprobs", TensorType(torch.float32, ("L", _WIDTH))),
    Output("ranks", "ranks", TensorType(torch.int32, ("L",))),
)
_CHOSEN = (
    OpCall("select_rows", ("token_positions",), {"x": "positions", "rows": "logit_rows"}),
    OpCall("sample", ("sampled",), {"logits": "choices", "positions": "token_positions"}),
    OpCall("top_logprobs", _SCORES),
)

# Samples one token for each sequence that has its last token in the step.
SAMPLE = register_ending(
    Ending(
        "sample",
        needs=("logits",),
        features=("sequences", "logit_rows", "penalties", "bans", "edits", "sampling", "logprobs"),
        calls=(*_CHOSEN, OpCall("advance", ("last_token", "position"))),
        outputs=(_TOKENS, *_LOGPROBS),
    )
)


def _fed(attributes: Mapping[str, Attribute]) -> int:
    return int(attributes["drafted"]) + 1


# Speculative decoding: a token is sampled after each token of the step, and drafts are kept as long as they equal the
# sampled tokens. The sequence's position moves back to the last kept token.
VERIFY = register_ending(
    Ending(
        "verify",
        needs=("logits",),
        features=("drafts", "sequences", "logit_rows", "penalties", "bans", "edits", "sampling", "logprobs"),
        calls=(
            *_CHOSEN,
            OpCall("accept_drafts", ("rejected", "taken")),
            OpCall("advance", ("last_token", "position")),
        ),
        outputs=(_TOKENS, Output("rejected", "rejected", TensorType(torch.int32, ("B",)), read=True), *_LOGPROBS),
        attributes={"drafted": 1},
        lengths=_fed,
    )
)

# Speculative decoding with a tree of drafts: keeps the drafts on the longest path that equals the sampled tokens, and
# moves their keys and values to consecutive slots.
VERIFY_TREE = register_ending(
    Ending(
        "verify_tree",
        needs=("logits",),
        features=(
            *("tree", "drafts", "sequences", "logit_rows", "tree_positions"),
            *("penalties", "bans", "edits", "sampling", "logprobs"),
        ),
        calls=(
            *_CHOSEN,
            OpCall("accept_tree", ("order", "rejected", "taken", "source")),
            OpCall("select_rows", ("committed",), {"x": "sampled", "rows": "order"}),
            *(OpCall("select_rows", (name,), {"x": name, "rows": "order"}) for name in _SCORES),
            OpCall("advance", ("last_token", "position"), {"sampled": "committed"}),
        ),
        outputs=(
            Output("tokens", "committed", TensorType(torch.int32, ("L",)), read=True),
            Output("rejected", "rejected", TensorType(torch.int32, ("B",)), read=True),
            *_LOGPROBS,
        ),
        attributes={"drafted": 1},
        lengths=_fed,
        caches=(OpCall("move_slots", ("kv",)),),
        tree=True,
    )
)

# The ending of a draft model: stores the tokens that it proposes, for the next step. Such an entry has no KV cache.
PROPOSE = register_ending(
    Ending(
        "propose",
        needs=("proposed",),
        features=("proposals",),
        calls=(OpCall("write_rows", ("drafts",), {"state": "drafts", "values": "proposed"}),),
    )
)

# The ending of a draft model that proposes a tree: `proposed_parents` i32[B, K] holds the parent node of each draft: 0
# for the sequence's last token, 1 + i for draft i, which comes before it.
PROPOSE_TREE = register_ending(
    Ending(
        "propose_tree",
        needs=("proposed", "proposed_parents"),
        features=("proposals", "tree_proposals"),
        calls=(
            OpCall("write_rows", ("drafts",), {"state": "drafts", "values": "proposed"}),
            OpCall("write_rows", ("parents",), {"state": "parents", "values": "proposed_parents"}),
        ),
    )
)

# Block diffusion: commits all tokens of a block at once, when each of its positions has one. Until then each step finds
# some of them, and the next runs the block again. The step that runs the complete block writes its final keys and
# values. A masked position has the id `mask_token`, which each definition sets. A step fills the positions whose most
# likely token has a probability above `sure_percent` percent, and at least so many that `steps` steps fill a block; one
# more commits it.
BLOCK = register_ending(
    Ending(
        "block",
        needs=("logits",),
        features=("blocks", "sequences", "logit_rows"),
        calls=(
            OpCall("fill_block", ("committed", "rejected", "taken", "filled"), {"logits": "choices"}),
            OpCall("write_rows", ("blocks",), {"state": "blocks", "values": "filled"}),
            OpCall("advance", ("last_token", "position"), {"sampled": "committed", "sample_index": "taken"}),
        ),
        outputs=(
            Output("tokens", "committed", TensorType(torch.int32, ("L",)), read=True),
            Output("rejected", "rejected", TensorType(torch.int32, ("B",)), read=True),
        ),
        attributes={"block": 8, "mask_token": -1, "steps": 8, "sure_percent": 90},
        lengths=lambda attributes: int(attributes["block"]),
        all_or_none=True,
    )
)


def _pool_misfit(attributes: Mapping[str, Attribute]) -> str:
    if attributes["classes"] and attributes["unit"]:
        return "unit=1 scales an embedding vector; classes=1 returns the logits of classes"
    if attributes["whole"] or attributes["pooling"] == "last":
        return ""
    return f"pooling={attributes['pooling']} needs every token of a sequence in one step, whole=1; only last does not"


# The ending of embedding models: returns a vector for each sequence, from the hidden states of its tokens
# (`ingot.ir.ops.pool`). `whole`: a step holds every token of a sequence, so nothing is cached; if 0, the step with the
# last tokens returns the vector. `unit`: a vector is scaled to length 1 unless the request says otherwise. `classes`: 1
# if the vector is no embedding vector but has the logits of classes, one for each element.
POOL = register_ending(
    Ending(
        "pool",
        needs=("hidden",),
        features=("sequences", "pooling"),
        calls=(OpCall("pool", ("pooled",), {"x": "hidden"}),),
        outputs=(Output("vectors", "pooled", TensorType(torch.float32, ("B", 0)), open=True),),
        attributes={"pooling": "last", "whole": 1, "unit": 0, "classes": 0},
        misfit=_pool_misfit,
    )
)


def feeds_whole(use: EndingUse) -> bool:
    """Return whether a program must get all tokens of a sequence in one step, as an encoder does.

    `use` is the ending of the program: what it does with the model's outputs, such as "pool".
    """
    return use.name == POOL.name and bool(POOL.set_by(use)["whole"])

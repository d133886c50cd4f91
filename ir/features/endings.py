"""The endings that Ingot brings."""

from collections.abc import Mapping

import torch

from ingot.ir.features.feature import Attribute, Ending, EndingUse, OpCall, Output
from ingot.ir.features.registry import register_ending
from ingot.ir.logprob_limits import MAX_LOGPROBS
from ingot.ir.types import TensorType

_SCORES = ("logprob_ids", "logprobs", "ranks")
_WIDTH = 1 + MAX_LOGPROBS  # the chosen token, then the most likely ones
_TOKENS = Output("tokens", "sampled", TensorType(torch.int32, ("L",)), read=True)
_RATED = (
    Output("logprob_ids", "logprob_ids", TensorType(torch.int32, ("L", _WIDTH))),
    Output("logprobs", "logprobs", TensorType(torch.float32, ("L", _WIDTH))),
    Output("ranks", "ranks", TensorType(torch.int32, ("L",))),
)
_CHOSEN = (
    OpCall("select_rows", ("token_positions",), {"x": "positions", "rows": "logit_rows"}),
    OpCall("sample", ("sampled",), {"logits": "choices", "positions": "token_positions"}),
    OpCall("top_logprobs", _SCORES),
)

# One token for each sequence whose last token was fed.
SAMPLE = register_ending(
    Ending(
        "sample",
        needs=("logits",),
        features=("sequences", "logit_rows", "penalties", "bans", "sampling", "logprobs"),
        calls=(*_CHOSEN, OpCall("advance", ("last_token", "position"))),
        outputs=(_TOKENS, *_RATED),
    )
)


def _fed(attributes: Mapping[str, Attribute]) -> int:
    return int(attributes["drafted"]) + 1


# A token after each token fed, as long as the fed drafts equal the sampled tokens. The row moves back to the last kept
# token.
VERIFY = register_ending(
    Ending(
        "verify",
        needs=("logits",),
        features=("drafts", "sequences", "logit_rows", "penalties", "bans", "sampling", "logprobs"),
        calls=(
            *_CHOSEN,
            OpCall("accept_drafts", ("rejected", "taken")),
            OpCall("advance", ("last_token", "position")),
        ),
        outputs=(_TOKENS, Output("rejected", "rejected", TensorType(torch.int32, ("B",)), read=True), *_RATED),
        attributes={"drafted": 1},
        lengths=_fed,
    )
)

# As `verify`, of drafts that are a tree: those on the longest path of sampled tokens are kept. Their keys and values
# are moved to where they stand one after the other.
VERIFY_TREE = register_ending(
    Ending(
        "verify_tree",
        needs=("logits",),
        features=(
            *("tree", "drafts", "sequences", "logit_rows", "tree_positions"),
            *("penalties", "bans", "sampling", "logprobs"),
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
            *_RATED,
        ),
        attributes={"drafted": 1},
        lengths=_fed,
        caches=(OpCall("move_slots", ("kv",)),),
        tree=True,
    )
)

# Drafts of the tokens that follow the last one, for the next step to feed. Such an entry has rows, and no cache.
PROPOSE = register_ending(
    Ending(
        "propose",
        needs=("proposed",),
        features=("proposals",),
        calls=(OpCall("write_rows", ("drafts",), {"state": "drafts", "values": "proposed"}),),
    )
)

# The same as a tree: `proposed_parents` i32[B, K] says of each draft which node it follows, 0 for the last token and
# 1 + i for draft i, which comes before it.
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

# All tokens of a block at once, when each of its positions has one: until then a step finds some of them, and the block
# is fed again. The step that is fed the whole block leaves its keys and values as they stay. `mask_token`, which each
# definition says, is fed where no token is found. A step fills the positions whose likeliest token has more than
# `sure_percent` hundredths, and so many that a block takes `steps` steps at most, and the one that commits it.
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


def _pooled_in_pieces(attributes: Mapping[str, Attribute]) -> str:
    if attributes["whole"] or attributes["pooling"] == "last":
        return ""
    return f"pooling={attributes['pooling']} needs every token of a sequence in one step, whole=1; only last does not"


# A vector for each sequence, from the hidden states of the tokens fed of it (`ingot.ir.ops.pool`). `whole`: a step
# feeds every token of a sequence, so that nothing is cached; where it is 0, the last tokens' step gives the vector.
# `unit`: a vector gets length 1 where the request does not say.
POOL = register_ending(
    Ending(
        "pool",
        needs=("hidden",),
        features=("sequences", "pooling"),
        calls=(OpCall("pool", ("pooled",), {"x": "hidden"}),),
        outputs=(Output("vectors", "pooled", TensorType(torch.float32, ("B", 0)), open=True),),
        attributes={"pooling": "last", "whole": 1, "unit": 0},
        misfit=_pooled_in_pieces,
    )
)


def feeds_whole(use: EndingUse) -> bool:
    """Whether a step of an entry with this ending feeds every token of a sequence."""
    return use.name == POOL.name and bool(POOL.set_by(use)["whole"])

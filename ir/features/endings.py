"""The endings that Ingot brings."""

from collections.abc import Mapping

from ingot.ir.features.feature import Ending, OpCall
from ingot.ir.features.registry import register_ending

_SCORES = ("logprob_ids", "logprobs", "ranks")
_RATED = {name: name for name in _SCORES}
_CHOSEN = (
    OpCall("select_rows", ("token_positions",), {"x": "positions", "rows": "logit_rows"}),
    OpCall("sample", ("sampled",), {"positions": "token_positions"}),
    OpCall("top_logprobs", _SCORES),
)

# One token for each sequence whose last token was fed.
SAMPLE = register_ending(
    Ending(
        "sample",
        needs=("logits",),
        features=("sequences", "penalties", "bans", "sampling", "logprobs"),
        calls=(*_CHOSEN, OpCall("advance", ("last_token", "position"))),
        outputs={"tokens": "sampled", **_RATED},
        read=("tokens",),
    )
)


def _fed(attributes: Mapping[str, int]) -> int:
    return attributes["drafted"] + 1


# A token behind each token fed, as long as the drafts that were fed are those that would have been taken. The row goes
# back behind the last of them.
VERIFY = register_ending(
    Ending(
        "verify",
        needs=("logits",),
        features=("drafts", "sequences", "penalties", "bans", "sampling", "logprobs"),
        calls=(
            *_CHOSEN,
            OpCall("accept_drafts", ("rejected", "taken")),
            OpCall("advance", ("last_token", "position")),
        ),
        outputs={"tokens": "sampled", "rejected": "rejected", **_RATED},
        read=("tokens", "rejected"),
        attributes={"drafted": 1},
        lengths=_fed,
    )
)

# Drafts of the tokens that follow the last one, for the next step to feed. Such an entry has rows, and no cache.
PROPOSE = register_ending(
    Ending(
        "propose",
        needs=("proposed",),
        features=("proposals",),
        calls=(OpCall("write_rows", ("drafts",), {"state": "drafts", "values": "proposed"}),),
        outputs={},
        read=(),
    )
)

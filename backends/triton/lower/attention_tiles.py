"""What the kernel of attention for few tokens can be told."""

from dataclasses import dataclass

DECODE_ATTENTION = "decode_attention"


@dataclass(frozen=True)
class DecodeTiles:
    """`keys` of a tile; `stages` of a loop, of which half hold tiles in flight and half page ids; contexts are cut for
    `programs` on each multiprocessor."""

    keys: int
    stages: int
    programs: int
    warps: int = 4
    ahead: int = 0
    combined: int = 4096
    exact: int = 0
    carried: int = 0
    early: int = 1

"""The schema of all_reduce.json, which describes a call of the peer backend."""

from pydantic import BaseModel, ConfigDict

from ingot.backends.triton.launches import Launch

# The name of the file in the executable's folder.
ALL_REDUCE = "all_reduce.json"


class PeerCall(BaseModel):
    """An all-reduce of values of one type, the residual add after it, or both.

    axis       the mesh axis of the all-reduce; "": there is none
    item       the bytes of an element
    adds       whether there is an add. Inputs 0 and 1 are then the values and the residual
    launches   the kernel's launch by the number of ranks. Its grid and integers are named "blocks", "vectors", "place"
               and "timeout". That of one rank adds without an all-reduce
    push       the launch of the kernel of two ranks for many bytes. It has an integer "chunk" too. None: no sum has so
               many
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    axis: str
    item: int
    adds: bool
    launches: dict[str, Launch]
    push: Launch | None

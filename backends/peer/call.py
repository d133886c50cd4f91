"""The schema of all_reduce.json, which describes one all-reduce of the peer backend."""

from pydantic import BaseModel, ConfigDict

from ingot.backends.triton.launches import Launch

# The name of the file in the executable's folder.
ALL_REDUCE = "all_reduce.json"


class PeerCall(BaseModel):
    """An all-reduce of values of one type.

    axis       the mesh axis
    item       the bytes of an element
    launches   the kernel's launch by the number of ranks. Its grid and integers are named "blocks", "vectors", "place"
               and "timeout"
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    axis: str
    item: int
    launches: dict[str, Launch]

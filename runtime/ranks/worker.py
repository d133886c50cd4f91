"""A rank of a mesh besides rank 0: load this rank's part of an artifact, then run the steps that rank 0 posts.

    python -m ingot.runtime.ranks.worker SPEC RANK AREA ORDERS

SPEC is the file that rank 0 has written, AREA the file descriptor of the shared memory, ORDERS the end of a pipe. Each
byte of the pipe is an order: to run the next step, or to run the ending of the step before. The process ends when rank
0 closes the pipe. It reports errors in the shared memory, and prints nothing.
"""

import json
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ingot.ir.errors import IngotError, RankError
from ingot.ir.mesh import STAGES, ranks
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.limits import read_limits
from ingot.runtime.loading.loader import bind
from ingot.runtime.loading.plan_file import read_plan_file
from ingot.runtime.ranks.posted_steps import run_posted
from ingot.runtime.ranks.seat import Seat, connections, read_room
from ingot.runtime.ranks.shared_area import BEAT_SECONDS, RankState, SharedArea
from ingot.runtime.ranks.step_slots import StepSlots

# How long this process may take to end by itself after rank 0 is gone.
_END_SECONDS = 1.0


def main() -> None:
    """Serve as the rank in the arguments until rank 0 closes the pipe. Exit with 1 on errors."""
    spec = json.loads(Path(sys.argv[1]).read_bytes())
    number, area_fd, orders = (int(one) for one in sys.argv[2:5])
    torch.set_num_threads(spec["threads"])
    area = SharedArea(spec["ranks"], spec["slot_words"], area_fd, stages=spec["mesh"].get(STAGES, 1))
    threading.Thread(target=_beat, args=(area, number), name="beats", daemon=True).start()
    threading.Thread(target=_end_with_rank_0, args=(orders, spec["folder"]), name="rank 0", daemon=True).start()
    status = 0
    try:
        _serve(spec, number, area, orders)
    except Exception as error:
        area.fail(number, RankState.LOST if lost_rank(error) else RankState.FAILED, _texts(error))
        status = 1
    shutil.rmtree(spec["folder"], ignore_errors=True)  # rank 0 does this too, unless it was killed
    os._exit(status)  # the threads of gloo may wait for ranks that are gone


def _beat(area: SharedArea, number: int) -> None:
    while True:
        area.beat(number)
        time.sleep(BEAT_SECONDS)


def _end_with_rank_0(orders: int, folder: str) -> None:
    """End this process soon after rank 0 has closed the pipe of orders. Its other thread may wait for the GPU, where a
    kernel waits for rank 0."""
    poll = select.poll()
    poll.register(orders, 0)  # a closed pipe is always reported (poll(2), POLLHUP)
    poll.poll()
    time.sleep(_END_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _look_at_gpu(area: SharedArea, number: int) -> None:
    """Report a fault of the GPU, such as of its memory, also while this process waits for orders.

    After such a fault, every call fails. A stream of its own is asked, because another one may be captured.
    """
    stream = torch.cuda.Stream()
    while True:
        time.sleep(BEAT_SECONDS)
        try:
            stream.query()
        except RuntimeError as error:
            area.fail(number, RankState.FAILED, _texts(error))
            os._exit(1)


def _serve(spec: Mapping[str, Any], number: int, area: SharedArea, orders: int) -> None:
    mesh = dict(spec["mesh"])
    rank = ranks(mesh)[number]
    artifact = open_artifact(spec["artifact"])
    folder, backend = Path(spec["folder"]), spec["backend"]
    seat = Seat(rank, mesh, read_room(spec["room"]), lambda: connections(folder, backend, mesh, rank))
    loaded = bind(artifact, seat=seat, capture=spec["capture"])
    if loaded.context.device.type == "cuda":
        threading.Thread(target=_look_at_gpu, args=(area, number), name="gpu", daemon=True).start()
    file = read_plan_file(artifact)
    slots, steps = StepSlots.of(file, read_limits(artifact, file.of(number))), loaded.round
    area.set_state(number, RankState.READY)
    run_posted(steps, area, slots, number, orders, lambda: loaded.executor.busy)


def lost_rank(error: BaseException | None) -> bool:
    """Return whether an error, or a cause of it, is that another rank is gone."""
    while error is not None and not isinstance(error, RankError):
        error = error.__cause__
    return error is not None


def _texts(error: Exception) -> dict[str, str]:
    if isinstance(error, IngotError):
        return {"what": error.what, "where": error.where, "expected": error.expected, "hint": error.hint}
    return {"what": f"{type(error).__name__}: {error}", "where": "", "expected": "", "hint": ""}


if __name__ == "__main__":
    main()

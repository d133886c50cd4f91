"""A rank of a mesh besides rank 0: load this rank's part of an artifact, then run the steps that rank 0 posts.

Each byte of the pipe of orders is an order: to run the next step, or to run the ending of the step before. The process
reports errors in the shared memory, and prints nothing.
"""

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ingot.backends.table import collective_backend
from ingot.ir.errors import IngotError, RankError
from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import STAGES, ranks, world_size
from ingot.runtime.cuda.early_context import EarlyContext
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.check_target import check_target
from ingot.runtime.loading.limits import read_limits
from ingot.runtime.loading.loader import bind, start_device
from ingot.runtime.loading.phases import Phases
from ingot.runtime.loading.plan_file import read_plan_file
from ingot.runtime.ranks.connecting import Connecting
from ingot.runtime.ranks.host import read_hosts
from ingot.runtime.ranks.measuring.rank_measurement import RankMeasurement
from ingot.runtime.ranks.measuring.schedule import MeasuringSchedule
from ingot.runtime.ranks.posted_steps import run_posted
from ingot.runtime.ranks.processes import MEETING, read_later
from ingot.runtime.ranks.reports import BEAT_SECONDS, RankState
from ingot.runtime.ranks.seat import Seat, connections, read_room
from ingot.runtime.ranks.shared_area import SharedArea
from ingot.runtime.ranks.step_slots import StepSlots


def run_rank(
    folder: Path,
    begin: Mapping[str, Any],
    number: int,
    area_fd: int,
    orders: int,
    phases: Phases,
    early: EarlyContext | None,
) -> int:
    """Serve as a rank until rank 0 closes the pipe, and return 0; 1 after an error, which is reported.

    folder    the private folder of the mesh
    begin     the artifact, the mesh and the device
    number    the index of the rank
    area_fd   the file descriptor of the shared memory
    orders    the end of the pipe of orders
    phases    records the phases of loading
    early     the thread that creates the GPU's context; None on a CPU
    """
    area = SharedArea(world_size(begin["mesh"]), area_fd)
    threading.Thread(target=_beat, args=(area, number), name="beats", daemon=True).start()
    try:
        _serve(folder, begin, number, area, orders, phases, early)
    except Exception as error:
        area.fail(number, RankState.LOST if lost_rank(error) else RankState.FAILED, _texts(error))
        return 1
    return 0


def _beat(area: SharedArea, number: int) -> None:
    while True:
        area.beat(number)
        time.sleep(BEAT_SECONDS)


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


def _serve(
    folder: Path,
    begin: Mapping[str, Any],
    number: int,
    area: SharedArea,
    orders: int,
    phases: Phases,
    early: EarlyContext | None,
) -> None:
    mesh, device = dict(begin["mesh"]), torch.device(begin["device"])
    rank, hosts = ranks(mesh)[number], read_hosts(begin["hosts"])

    def make_ready() -> None:
        start_device(device, phases, early)
        if device.type == "cuda":
            area.tell_free(number, max(1, torch.cuda.mem_get_info()[0]))  # before any connection takes some

    def connected() -> Mapping[str, Communicator]:
        with phases.phase("connect"):
            return connections(folder / MEETING, collective_backend(device.type), mesh, rank, hosts)

    with ThreadPoolExecutor(1) as background:
        ready = background.submit(make_ready)
        with phases.phase("manifest"):
            check = None if number in hosts[0].ranks else check_target  # rank 0 checks the target of its host
            artifact = open_artifact(begin["artifact"], check=check)
        ready.result()
    connecting = Connecting(rank, connected)
    with phases.phase("rank 0"):
        later = read_later(folder)
    torch.set_num_threads(later["threads"])
    area.add_slots(later["slot_words"], mesh.get(STAGES, 1))
    os.close(area.fd)
    measurement: RankMeasurement | None = None
    if later["measuring"] is not None:
        measurement = RankMeasurement(number, folder / MEETING, MeasuringSchedule.read(later["measuring"]))

    def connect() -> Mapping[str, Communicator]:
        return connecting if measurement is None else measurement.connections(connecting)

    seat = Seat(rank, mesh, read_room(later["room"]), connect)
    loaded = bind(artifact, seat=seat, capture=later["capture"], phases=phases, ready=ready, clock=later["clock"])
    if device.type == "cuda":
        threading.Thread(target=_look_at_gpu, args=(area, number), name="gpu", daemon=True).start()
    file = read_plan_file(artifact)
    slots = StepSlots.of(file, read_limits(artifact, file.of(number)))
    steps = loaded.round if measurement is None else measurement.launcher(loaded.executor, loaded.context)
    area.ready(number, phases.spans)
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

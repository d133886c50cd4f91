"""The process of a rank of a mesh besides rank 0.

    python -m ingot.runtime.ranks.worker FOLDER RANK AREA ORDERS

FOLDER is the private folder in which the ranks meet, AREA the file descriptor of the shared memory, ORDERS the end of a
pipe. The process ends when rank 0 closes the pipe. `rank_process.py` does its work. Importing that imports torch; the
context of a GPU is created at the same time.
"""

import os
import select
import shutil
import sys
import threading
import time
from pathlib import Path

from ingot.runtime.cuda.early_context import begin_context
from ingot.runtime.loading.phases import Phases, Span, process_age
from ingot.runtime.ranks.processes import read_begin

# How long this process may take to end by itself after rank 0 is gone.
_END_SECONDS = 1.0


def main() -> None:
    """Serve as the rank in the arguments until rank 0 closes the pipe. Exit with 1 on errors."""
    folder, (number, area_fd, orders) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    phases, now = Phases(), time.monotonic()
    phases.add(Span("start", now - (process_age() or 0.0), now))
    threading.Thread(target=_end_with_rank_0, args=(orders, folder), name="rank 0", daemon=True).start()
    begin = read_begin(folder)
    context = begin_context(phases) if begin["device"] == "cuda" else None
    try:
        with phases.phase("engine"):
            from ingot.runtime.ranks.rank_process import run_rank
    finally:
        if context is not None:
            context.imported()
    status = run_rank(folder, begin, number, area_fd, orders, phases, context)
    shutil.rmtree(folder, ignore_errors=True)  # rank 0 does this too, unless it was killed
    os._exit(status)  # the threads of gloo may wait for ranks that are gone


def _end_with_rank_0(orders: int, folder: Path) -> None:
    """End this process soon after rank 0 has closed the pipe of orders. Its other thread may wait for the GPU, where a
    kernel waits for rank 0."""
    poll = select.poll()
    poll.register(orders, 0)  # a closed pipe is always reported (poll(2), POLLHUP)
    poll.poll()
    time.sleep(_END_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()

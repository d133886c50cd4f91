"""Record what the engine process runs, with PyTorch's profiler."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.ir.errors import OutputError, RequestError


class Profiler:
    """Records from `start` to `stop`, on the CPU and, if there is one, on the GPU. One recording at a time."""

    def __init__(self) -> None:
        self._recording: Any = None

    def start(self) -> None:
        """Begin to record. Raises RequestError if a recording runs already."""
        if self._recording is not None:
            raise RequestError("a profile is being recorded already", expected="stop_profile first")
        import torch
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        recording = profile(activities=activities)
        recording.start()
        self._recording = recording

    def stop(self, path: str) -> None:
        """End the recording, and write it to a new file in Chrome's trace format. Raises RequestError if none runs, and
        OutputError if the file cannot be written."""
        if self._recording is None:
            raise RequestError("no profile is being recorded", expected="start_profile first")
        recording, self._recording = self._recording, None
        recording.stop()
        partial = Path(f"{path}.partial")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(partial))
            os.replace(partial, path)
        except (OSError, RuntimeError) as error:
            raise OutputError(f"the profile cannot be written: {error}", where=path) from None
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

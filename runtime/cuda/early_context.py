"""A GPU's context, made while this process still imports torch.

Where the driver loads the code of all kernels at once (CUDA_MODULE_LOADING=EAGER), making the context takes seconds:
the kernels are those of the libraries that are loaded by then, torch's among them. cuBLAS has a CUDA runtime of its own
inside, and loads its kernels when it is first asked for a handle.

Importing torch loads its libraries first and then runs Python for as long again, so a thread waits for the libraries
and asks for the context beside that. It loads none itself, so that they come in torch's order, and calls nothing of
CUDA before all are there: code that runs as a library is loaded may call the driver, which may be loading a library.

Nothing here says what went wrong. The next use of the GPU finds it out, and says it.
"""

import contextlib
import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ingot.runtime.phases import Phases

# Between two looks for torch's libraries: hundredths of what loading them takes.
_PAUSE_S = 0.005


class EarlyContext:
    """The context of the first visible GPU, which is torch's default one, in the making.

    `phases` takes the seconds that making it took, as "context", and those of cuBLAS's first handle, as "cublas".
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._imported = threading.Event()
        # No daemon: a process that ends must not take the driver down while it makes the context.
        self._thread = threading.Thread(target=self._try_to_make, name="early-context", daemon=False)
        self._thread.start()

    def imported(self) -> None:
        """Torch is imported, or will not be: libraries that are not there now do not come any more."""
        self._imported.set()

    def wait(self) -> None:
        """Until the context is there, or cannot be made."""
        self._thread.join()

    def _try_to_make(self) -> None:
        with contextlib.suppress(Exception):  # the next use of the GPU finds it, and says it
            self._make()

    def _make(self) -> None:
        library = torch_cuda_library()
        handle = library and wait_until_loaded(library, self._imported)
        if not handle:
            return
        with self._phases.phase("context"):
            made = make_context(handle)
        if made:
            with self._phases.phase("cublas"):
                start_cublas(handle)


def begin_context(phases: Phases) -> EarlyContext | None:
    """Begin to make the context beside the import of torch that is to follow; None where torch is imported already,
    and may have been told to use another GPU."""
    return None if "torch" in sys.modules else EarlyContext(phases)


def torch_cuda_library() -> Path | None:
    """The library that holds torch's kernels, found without importing torch; None where it is built without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libtorch_cuda.so"
    return library if library.is_file() else None


def wait_until_loaded(library: Path, given_up: threading.Event) -> int | None:
    """The handle of a library once other code has loaded it and all that it needs; None when it was not by the time
    that `given_up` is set.

    The loader waits for a thread that is loading libraries. It is called as a foreign function, which lets other
    threads run Python: `ctypes.CDLL` would keep the interpreter's lock, and that thread may want it.
    """
    dlopen: Any = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    while True:
        last = given_up.is_set()
        handle: int | None = dlopen(os.fsencode(library), os.RTLD_NOLOAD | os.RTLD_LAZY)
        if handle or last:
            return handle
        given_up.wait(_PAUSE_S)


def make_context(handle: int) -> bool:
    """Make the context of the first GPU by the CUDA runtime that a loaded library uses; whether there is one now."""
    # Freeing nothing needs a context all the same (CUDA Runtime API, "Initialization").
    return _call(handle, "cudaFree", None) == 0


def start_cublas(handle: int) -> bool:
    """Have the cuBLAS that a loaded library uses load its kernels, by a handle that is given back; whether it did."""
    made = ctypes.c_void_p()
    if _call(handle, "cublasCreate_v2", ctypes.byref(made)) != 0:
        return False
    return _call(handle, "cublasDestroy_v2", made) == 0


def _call(handle: int, function: str, *arguments: Any) -> int | None:
    """The status of a function of a loaded library or of what it needs; None where there is none of this name.

    A foreign function lets other threads run Python meanwhile.
    """
    found: Any = getattr(ctypes.CDLL("", handle=handle), function, None)
    return None if found is None else int(found(*arguments))

"""Creation of a GPU's context while this process still imports torch.

If the driver loads all kernels at once (CUDA_MODULE_LOADING=EAGER), creating the context takes seconds. It then loads
the kernels of all loaded libraries, torch's included. cuBLAS contains its own CUDA runtime, and loads its kernels when
the first handle is created.

Importing torch first loads its libraries, then runs Python for about as long. A thread waits for the libraries and
creates the context during that Python code. The thread loads no library, so that torch's loading order stays. It calls
CUDA only after all libraries are loaded: initializers of a library may call the driver, which may be loading a library.

This module reports no errors. The next use of the GPU meets and reports them.
"""

import contextlib
import ctypes
import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ingot.runtime.loading.phases import Phases

# Seconds between two checks for torch's libraries: hundredths of their loading time.
_PAUSE_S = 0.005


class EarlyContext:
    """Creates the CUDA context of the first visible GPU in a thread, while the main thread imports torch. torch uses
    that GPU by default.

    `phases` records the seconds of two phases: "context", and "cublas" for the first cuBLAS handle.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._imported = threading.Event()
        # Not a daemon: a process must not exit while the driver creates the context.
        self._thread = threading.Thread(target=self._try_to_make, name="early-context", daemon=False)
        self._thread.start()

    def imported(self) -> None:
        """Tell the thread that the import of torch has ended, so that it stops waiting for torch's libraries. Call it
        even if the import failed."""
        self._imported.set()

    def wait(self) -> None:
        """Wait until the thread has created the CUDA context or has failed to."""
        self._thread.join()

    def _try_to_make(self) -> None:
        with contextlib.suppress(Exception):  # the next use of the GPU meets and reports it
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
    """Start to create the CUDA context of the first GPU in a thread, and return the thread's handle. The caller then
    imports torch at the same time.

    Return None if torch is imported already: it may use another GPU. `phases` records how long the parts take.
    """
    return None if "torch" in sys.modules else EarlyContext(phases)


def torch_cuda_library() -> Path | None:
    """Return the path of torch's library of CUDA kernels. torch is not imported for it. Return None if torch is built
    without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "lib" / "libtorch_cuda.so"
    return library if library.is_file() else None


def wait_until_loaded(library: Path, given_up: threading.Event) -> int | None:
    """Wait until other code has loaded a library and its dependencies, and return the library's handle. Return None if
    the event `given_up` is set first.

    Calls `dlopen` as a foreign function, because that releases the GIL. `ctypes.CDLL` would hold it. The thread that
    loads the library may need the GIL, and `dlopen` waits for that thread.
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
    """Create the CUDA context of the first GPU, and return whether that worked. `handle` is a loaded library that links
    the CUDA runtime."""
    # Even freeing a null pointer creates the context (CUDA Runtime API, "Initialization").
    return _call(handle, "cudaFree", None) == 0


def start_cublas(handle: int) -> bool:
    """Make cuBLAS load its kernels now, and return whether that worked. This creates and destroys a cuBLAS handle.
    `handle` is a loaded library that links cuBLAS."""
    made = ctypes.c_void_p()
    if _call(handle, "cublasCreate_v2", ctypes.byref(made)) != 0:
        return False
    return _call(handle, "cublasDestroy_v2", made) == 0


def _call(handle: int, function: str, *arguments: Any) -> int | None:
    """Call a C function by name, without the GIL, and return its status: 0 for success. Return None if there is no such
    function. `handle` is a loaded library; its dependencies are searched too."""
    found: Any = getattr(ctypes.CDLL("", handle=handle), function, None)
    return None if found is None else int(found(*arguments))

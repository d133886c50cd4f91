"""The TensorRT library: whether it can be used here, its version, its log, and engines that it reads."""

import re
from importlib import import_module
from typing import Any

from ingot.ir.errors import BackendError, TargetError
from ingot.ir.machine.extras import require
from ingot.ir.machine.target import Target

# The first version whose ONNX parser reads opset 23 by its documentation (the ONNX opset guide of TensorRT 11), and in
# which every network is strongly typed. Signatures of its Python package are checked for 11.0 to 11.4.
FIRST, BELOW = (11, 0), (12, 0)


def find_library(purpose: str) -> Any:
    """Return the module `tensorrt`. `purpose` says for messages what needs it.

    Raises TargetError if it is not installed, does not load, or has a version that was never tried.
    """
    require("tensorrt", "tensorrt-cu13", purpose, extra="tensorrt")
    try:
        library = import_module("tensorrt")
    except (ImportError, OSError) as error:  # the package without its libraries
        raise TargetError(
            f"{purpose} needs TensorRT, which does not load: {error}"[:300],
            expected="the packages tensorrt-cu13 and tensorrt-cu13-libs",
            hint="pip install --force-reinstall 'ingot[tensorrt]'",
        ) from error
    found = str(getattr(library, "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)(\.|$)", found)
    if numbers is None or not FIRST <= (int(numbers[1]), int(numbers[2])) < BELOW:
        raise TargetError(
            f"{purpose} needs TensorRT, and its version is {found or 'unknown'}",
            expected=f"{FIRST[0]}.{FIRST[1]} or newer, below {BELOW[0]}.{BELOW[1]}",
            hint="pip install 'ingot[tensorrt]'",
        )
    return library


def missing_here(target: str) -> str:
    """Return why this machine cannot build engines for `target`, such as "sm_90"; "" if it can.

    The builder runs kernels to choose among them, so it needs such a GPU.
    """
    try:
        for module in ("tensorrt", "onnx"):
            require(module, "tensorrt-cu13" if module == "tensorrt" else module, "it", extra="tensorrt")
        here = Target.detect("cuda").name
        if here == target:
            find_library("it")
            return ""
    except TargetError as error:
        return error.what
    return f"it builds engines for {target} only on such a GPU; the GPU of this machine: {here}"


def product_here() -> str:
    """Return the product name of this machine's GPU. Raises TargetError if there is none."""
    return Target.detect("cuda").gpu or "unknown"


def logger(library: Any) -> Any:
    """Return a logger for TensorRT. Its list `errors` has the errors that it got, the last one last."""

    class Log(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)  # its documentation demands this explicit call
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in (library.ILogger.INTERNAL_ERROR, library.ILogger.ERROR):
                self.errors.append(msg)

    return Log()


def last_error(log: Any) -> str:
    """Return the last error that a logger got, for a message."""
    return str(log.errors[-1])[:400] if log.errors else "it gives no reason"


def open_engine(library: Any, log: Any, content: bytes, where: str) -> Any:
    """Return the engine `content`, deserialized. Raises BackendError, which names `where`, if TensorRT refuses it."""
    engine = library.Runtime(log).deserialize_cuda_engine(content)  # it keeps the runtime, not the log
    if engine is None:
        raise BackendError(f"the TensorRT engine does not load: {last_error(log)}", where=where)
    return engine

"""The signatures of TensorRT's Python package, read from its bindings without TensorRT.

The package `tensorrt-cu13-bindings` links with libraries that it does not bring. Of them it needs a few functions, and
calls none while it is imported. A small library in their place is enough to read all signatures:

    python tests/support/kernels/published_tensorrt.py FOLDER    # FOLDER holds the unpacked wheel

prints what `tensorrt_signatures.json` holds, for the names that it has.
"""

import ctypes
import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("tensorrt_signatures.json")
# The libraries that the bindings of TensorRT 11 link with, and the functions that they take from them.
_LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
_FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)

# Modules before the names of types in the text of a signature. Int is `typing.SupportsInt`.
_MODULES = r"(?:tensorrt_bindings\.)?tensorrt\.|nvonnxparser::|typing\.Supports|typing_extensions\."


def read_table() -> dict[str, Any]:
    """The table of signatures, enums and attributes of the names that the backend uses."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def read_bindings(folder: Path) -> dict[str, Any]:
    """The same of the bindings in `folder`, read in a process of its own, and their version."""
    done = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _main(folder: str) -> None:
    from shutil import which

    compiler = which("g++") or which("clang++") or which("gcc")
    assert compiler, "a C++ compiler"
    with tempfile.TemporaryDirectory() as scratch:
        code = "".join(f'extern "C" void *{name}() {{ return nullptr; }}\n' for name in _FUNCTIONS)
        for name in _LIBRARIES:
            path = Path(scratch) / name
            command = [compiler, "-x", "c++", "-", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(path)]
            subprocess.run(command, input=code.encode(), check=True)
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # found by its soname when the bindings are loaded
        sys.path.insert(0, folder)
        library = importlib.import_module("tensorrt_bindings")
        table = read_table()
        answer = {
            "version": library.__version__,
            "signatures": {name: _signatures(library, name) for name in table["signatures"]},
            "enums": {
                name: {member: int(getattr(getattr(library, name), member)) for member in members}
                for name, members in table["enums"].items()
            },
            "attributes": {
                name: [one for one in names if hasattr(getattr(library, name), one)]
                for name, names in table["attributes"].items()
            },
        }
    print(json.dumps(answer, indent=2))


def _signatures(library: Any, name: str) -> list[str]:
    """The overloads of a method, such as "(self: Builder, flags: int = 0) -> INetworkDefinition"."""
    owner, _, method = name.partition(".")
    text = getattr(getattr(library, owner), method).__doc__
    found = re.findall(rf"^(?:\d+\. )?{method}(\(self.*)$", text, re.M)
    return [re.sub(_MODULES, "", one) for one in found]


if __name__ == "__main__":
    _main(sys.argv[1])

"""The interface of the library of C++ kernels: a digest of its functions' declarations, which the library exports.

A library of another version of Ingot may have a function with the same name and other arguments. A call would then read
wrong memory and return wrong numbers, without an error. Loading therefore compares digests.
"""

import ctypes
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

KERNELS = Path(__file__).with_name("kernels")
# The exported variable, and the macro with which its value is given to the compiler. See kernels/interface.cpp.
SYMBOL, MACRO = "kernel_interface", "KERNEL_INTERFACE"
_DIGEST = 64  # characters of a SHA-256 in hexadecimal
_COMMENT = re.compile(r"//[^\n]*")
_FUNCTION = re.compile(r'extern "C" \w+ [\w#]+\([^)]*\)')
_ENUM = re.compile(r"enum \w+ : int64_t \{[^}]*\}")  # callers pass the place of a name as an integer


def kernel_sources() -> Sequence[Path]:
    """Return the C++ files of the kernels, in a fixed order."""
    return sorted(path for path in KERNELS.iterdir() if path.suffix in (".cpp", ".h"))


def declarations() -> list[str]:
    """Return the declarations of all exported functions with the names of arguments, and all enums, as plain text."""
    found: list[str] = []
    for path in kernel_sources():
        text = _COMMENT.sub("", path.read_text(encoding="utf-8")).replace("\\\n", " ")
        plain = " ".join(text.split())
        found += [match.group() for pattern in (_ENUM, _FUNCTION) for match in pattern.finditer(plain)]
    return found


def interface_digest() -> str:
    """Return the digest of the interface that the Python functions of this version of Ingot call."""
    return hashlib.sha256("\n".join(declarations()).encode()).hexdigest()


def built_digest(library: ctypes.CDLL) -> str | None:
    """Return the digest that a built library exports; None if it exports none, as libraries of older versions."""
    try:
        exported = (ctypes.c_char * _DIGEST).in_dll(library, SYMBOL)
    except ValueError:
        return None
    return exported.value.decode("ascii", "replace")

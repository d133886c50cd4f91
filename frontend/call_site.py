"""Find the line of a model definition that makes the current call, in Python's stack."""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

from ingot import ir

_LAYER = re.compile(r"\blayers\.(\d+)")
# Frames of torch, Ingot's ops and the tracer are between a definition and its call.
_NOT_THEIRS = tuple(str(Path(file).parent) + os.sep for file in (str(torch.__file__), str(ir.__file__), __file__))


@dataclass(frozen=True)
class CallSite:
    """The source lines of a model definition (an `nn.Module`) that make one call of the program. "" means unknown.

    at      file and line of the call itself, such as the line of `ops.linear` in the module Linear
    layer   number of the decoder layer, as text
    place   file and line in the layer's block that leads to the call, such as `self.q(x)` in Attention. For a call
            outside of layers, it is a line in the model's own forward.
    """

    at: str = ""
    layer: str = ""
    place: str = ""

    @property
    def origin(self) -> str:
        """Return layer and place as text, such as "layer 3, blocks/attention.py:112". Unknown parts are left out."""
        return ", ".join([f"layer {self.layer}"] * bool(self.layer) + [self.place] * bool(self.place))


def find_call_site(modules: Mapping[int, str], outermost: CodeType) -> CallSite:
    """Return the lines of a model definition that make the current call. They are found on Python's stack.

    modules     `id()` of each module of the definition -> its name, such as "layers.3.mlp"
    outermost   code object of the function that runs the definition. Its callers are not searched.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if _is_theirs(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    layer, place, block = "", frames[-1] if frames else None, None
    for one in frames:  # from the call outwards
        module = _first_argument(one)
        found = _LAYER.search(modules.get(id(module), ""))
        if found and layer in ("", found[1]) and block in (None, module):
            layer, place = found[1], one
            if isinstance(module, nn.Module) and any(True for _ in module.children()):  # not a leaf
                block = module
    at = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
    return CallSite(at, layer, f"{_short(place.f_code.co_filename)}:{place.f_lineno}" if place else "")


def _first_argument(frame: FrameType) -> object:
    """Return the first argument of a frame's function, which is `self` in a method; None if it has none."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


@lru_cache
def _is_theirs(file: str) -> bool:
    return not file.startswith(_NOT_THEIRS)


@lru_cache
def _short(file: str) -> str:
    """Return a file name with its parent folder only, such as "blocks/attention.py"."""
    return "/".join(Path(file).parts[-2:])

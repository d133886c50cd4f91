"""emit-executables: every region is compiled by its backend, distinct ones once; providers build their kernels."""

from dataclasses import dataclass, replace
from typing import ClassVar

from ingot.ir.program import RegionCall
from ingot.ir.record import Numerics
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class EmitExecutables(Pass):
    """Hands the regions that have no executable yet to the driver, which compiles them side by side."""

    name: ClassVar[str] = "emit-executables"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        waiting = [region for region in program.regions.values() if region.executable is None]
        used = {node.meta.get("provider") for node in program.calls()}
        libraries = [
            backend
            for backend in context.backends
            if backend.emits_library and backend.name in used and backend.name not in program.libraries
        ]
        for backend in libraries:
            assert context.emit_library is not None, "building kernels needs an emitter in the context"
            first = next(node for node in program.calls() if node.meta.get("provider") == backend.name)
            if rewriter.take(first):
                program.libraries[backend.name] = context.emit_library(backend)
        calls = {node.target.name: node for node in program.calls() if isinstance(node.target, RegionCall)}
        waiting = [region for region in waiting if rewriter.take(calls[region.name])]
        if not waiting:
            return
        assert context.emit is not None, "compiling regions needs an emitter in the context"
        for name, executable in context.emit(waiting).items():
            program.regions[name] = replace(program.regions[name], executable=executable)

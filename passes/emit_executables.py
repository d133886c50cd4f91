"""emit-executables: every region is compiled by its backend, distinct ones once; providers build their kernels."""

from dataclasses import dataclass, replace
from typing import ClassVar

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
        if not waiting and not libraries:
            return
        assert context.emitter is not None, "compiling needs an emitter in the context"
        for backend in libraries:
            program.libraries[backend.name] = context.emitter.emit_library(backend)
            rewriter.matched()
        for name, executable in context.emitter.emit(waiting).items() if waiting else ():
            program.regions[name] = replace(program.regions[name], executable=executable)
            rewriter.matched()

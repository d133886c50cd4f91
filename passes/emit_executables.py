"""emit-executables: compiles each distinct region with its backend, and builds the backends' kernels."""

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import LibraryBuilder, call_compilers
from ingot.ir.program import Region, RegionCall
from ingot.ir.text import print_region_body
from ingot.passes.base import Pass, PassContext
from ingot.passes.call_bodies import call_body
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class EmitExecutables(Pass):
    """Compiles all regions (calls compiled together), and single calls of backends that compile single calls.

    Code that exists already is not compiled again. The driver compiles in parallel.
    """

    name: ClassVar[str] = "emit-executables"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        self._build_libraries(rewriter, context)
        _compile_calls(rewriter, context)
        calls = {node.target.name: node for node in program.calls() if isinstance(node.target, RegionCall)}
        waiting = [region for region in program.regions.values() if region.executable is None]
        waiting = [region for region in waiting if rewriter.take(calls[region.name])]
        waiting += [call for call in program.compiled.values() if call.executable is None]
        if not waiting:
            return
        assert context.emit is not None, "compiling regions needs an emitter in the context"
        for name, executable in context.emit(waiting).items():
            table = program.regions if name in program.regions else program.compiled
            table[name] = replace(table[name], executable=executable)

    def _build_libraries(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        used = {node.meta.get("backend") for node in program.calls()}
        for backend in context.backends:
            if backend.name not in used or backend.name in program.libraries or not isinstance(backend, LibraryBuilder):
                continue
            assert context.emit_library is not None, "building kernels needs an emitter in the context"
            first = next(node for node in program.calls() if node.meta.get("backend") == backend.name)
            if rewriter.take(first):
                program.libraries[backend.name] = context.emit_library(backend)


def _compile_calls(rewriter: Rewriter, context: PassContext) -> None:
    """Add a region of one call to `program.compiled` for each call that its backend compiles alone.

    Equal calls share a region, and so their code.
    """
    program = rewriter.program
    compilers = {backend.name for backend in call_compilers(context.backends)}
    known = {print_region_body(call.body): call.name for call in program.compiled.values()}
    for node in program.calls():
        backend = node.meta.get("backend")
        if backend not in compilers or isinstance(node.target, RegionCall) or node.target is operator.getitem:
            continue
        body = call_body(program, node, f"c{len(program.compiled)}")
        text = print_region_body(body)
        if text not in known:
            if not rewriter.take(node):
                continue
            known[text] = body.name
            program.compiled[body.name] = Region(body.name, body, backend)
        node.meta["compiled"] = known[text]

"""Remove calls and params without users. The pass manager does this after every pass."""

from ingot.ir.program import Program
from ingot.passes.effects import effect_of


def eliminate_dead_code(program: Program) -> int:
    """Remove calls and params that nothing reads. Return the number of removed calls.

    A write to a state, such as a KV cache, is never removed. The verifier reports an error if the program does not
    return its result.
    """
    removed = 0
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and not node.users and effect_of(node, program).droppable:
            program.graph.erase_node(node)
            removed += 1
    program.remove_unused_params()
    return removed

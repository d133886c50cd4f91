"""Dead-code elimination, which the manager runs after every pass."""

from ingot.ir.program import Program
from ingot.passes.effects import effect_of


def eliminate_dead_code(program: Program) -> int:
    """Remove calls that nothing uses, then params that nothing uses; the number of calls removed.

    A write of a state is never removed: one whose new version nobody returns is an error, which the verifier names.
    """
    removed = 0
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function" and not node.users and effect_of(node, program).droppable:
            program.graph.erase_node(node)
            removed += 1
    program.remove_unused_params()
    return removed

"""Single edits that change what a program means: the faults that a diff, a test or a person has to find.

An edit is a function from a program and a random draw to a changed copy, or None where the program has no place for it.
What comes out need not be a legal program.
"""

from semantic_edits.of_calls import (
    another_cast,
    another_number,
    another_op,
    another_region_argument,
    another_scale,
    another_slice,
    another_value,
    another_view,
    dropped_bias,
    left_out,
    put_in,
    region_twice,
    swapped_arguments,
    twice,
)
from semantic_edits.of_programs import (
    another_body,
    another_bound,
    another_bucket,
    another_call_backend,
    another_mesh,
    another_output,
    another_region_backend,
    another_result,
    another_stage,
    another_state,
    dissolved_region,
    one_more,
)
from semantic_edits.of_types import (
    another_input_type,
    another_param_type,
    another_placement,
    another_recipe,
    another_result_placement,
    another_result_type,
)
from semantic_edits.places import Edit

EDITS: tuple[Edit, ...] = (
    another_op,
    another_scale,
    another_number,
    another_view,
    another_slice,
    another_cast,
    swapped_arguments,
    another_value,
    another_region_argument,
    dropped_bias,
    left_out,
    put_in,
    another_recipe,
    another_input_type,
    another_param_type,
    another_result_type,
    another_placement,
    another_result_placement,
    another_call_backend,
    another_region_backend,
    another_body,
    another_result,
    dissolved_region,
    another_stage,
    another_bound,
    another_bucket,
    another_mesh,
    another_state,
    another_output,
    one_more,
    twice,
    region_twice,
)

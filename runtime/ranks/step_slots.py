"""A step's inputs in shared memory: rank 0 writes the packed buffer of a step, and the other ranks read it.

A slot holds i32 words: the step's sizes and counts, the flat buffer of `StepInputs` as it is, the orders that go with a
step (token counts to recompute, rows of logit edits), and the masks of grammars, which come before the ending.
"""

import torch

from ingot.ir.artifact.plan import PlanFile
from ingot.ir.features import find_input
from ingot.ir.parse import parse_type
from ingot.runtime.loading.limits import Limits
from ingot.runtime.scheduling.edited_rows import MaskRows, RowEdit
from ingot.runtime.steps.step import StepInputs, StepLayout, StepSizes, layout_of
from ingot.runtime.steps.token_counts import Recount

# Sizes T, B, L, P and G; whether the ending waits; words of the buffer; counts of recounts and edits; rows and words of
# the masks; whether the ending waits for masks.
_HEADER = 16
_MASKS = 9
_WAITS_FOR_MASKS = 11


def mesh_layout(file: PlanFile) -> StepLayout:
    """Return the layout of a step's inputs, with those of all ranks. `file` has the plans of all ranks."""
    plans = [plan for position in file.positions.values() for plan in position.plans.values()]
    return layout_of([name for name in plan.inputs if find_input(name) is not None] for plan in plans)


class SteppedInputs(StepInputs):
    """The inputs of a step that rank 0 has built, as another rank reads them."""

    def __init__(
        self, layout: StepLayout, flat: torch.Tensor, sizes: StepSizes, *, waits: bool, for_masks: bool
    ) -> None:
        super().__init__(layout, flat, sizes)
        self._waits, self._for_masks = waits, for_masks

    @property
    def ends_late(self) -> bool:
        return self._waits

    @property
    def waits_for_masks(self) -> bool:
        return self._for_masks


class StepSlots:
    """Writes steps to slots of shared memory, and reads them.

    layout      the inputs of a step, for all ranks together
    limits      the limits of the artifact, which bound the size of a slot
    edit_words  the words of a row of logit edits; 0 without such a state
    """

    def __init__(self, layout: StepLayout, limits: Limits, edit_words: int) -> None:
        self._layout, self._edit_words = layout, edit_words
        pages = -(-limits.max_seq_len // limits.page_size)
        rows, tokens = limits.max_batch, limits.max_tokens
        flat = layout.words(StepSizes(tokens, rows, tokens, pages, rows))
        self._masks_at = _HEADER + flat + rows * (3 + limits.max_seq_len) + rows * (1 + edit_words)
        self.words = -(-(self._masks_at + rows * (1 + edit_words)) // 2) * 2  # inputs of 8-byte elements are aligned

    @staticmethod
    def of(file: PlanFile, limits: Limits) -> "StepSlots":
        """Return the slots for the steps of an artifact, whose plans are in `file`."""
        plans = [plan for position in file.positions.values() for plan in position.plans.values()]
        states = [state for plan in plans for name, state in plan.states.items() if name == "edits"]
        width = parse_type(states[0].type).shape[-1] if states else 0
        assert isinstance(width, int)
        return StepSlots(mesh_layout(file), limits, width)

    def write(self, slot: torch.Tensor, inputs: StepInputs) -> slice:
        """Write a step to a slot, and return which words. Late inputs and masks are written by `write_late`."""
        sizes, words = inputs.sizes, self._layout.words(inputs.sizes)
        head = (sizes.T, sizes.B, sizes.L, sizes.P, sizes.G, inputs.ends_late, words)
        slot[: len(head)] = torch.tensor(head, dtype=torch.int32)
        slot[len(head) : _MASKS] = torch.tensor([len(inputs.recounts), len(inputs.edits)], dtype=torch.int32)
        slot[_MASKS] = 0
        slot[_WAITS_FOR_MASKS] = inputs.waits_for_masks
        slot[_HEADER : _HEADER + words] = inputs.flat[:words]
        rest = slot.numpy()[_HEADER + words :]
        at = 0
        for one in inputs.recounts:
            numbers = (one.row, len(one.prompt), len(one.generated), *one.prompt, *one.generated)
            rest[at : at + len(numbers)] = numbers
            at += len(numbers)
        for edit in inputs.edits:
            rest[at], rest[at + 1 : at + 1 + len(edit.values)] = edit.row, edit.values
            at += 1 + len(edit.values)
        return slice(0, _HEADER + words + at)

    def write_late(self, slot: torch.Tensor, inputs: StepInputs) -> list[slice]:
        """Write the late inputs and the masks of a step, whose other inputs are in the slot. Return which words."""
        words = self._layout.words(inputs.sizes)
        early = self._layout.early_words(inputs.sizes)
        slot[_HEADER + early : _HEADER + words] = inputs.flat[early:words]
        written = [slice(_HEADER + early, _HEADER + words)]
        if inputs.masks is not None:
            rows, width = inputs.masks.words.shape
            slot[_MASKS : _MASKS + 2] = torch.tensor([rows, width], dtype=torch.int32)
            area = slot[self._masks_at : self._masks_at + rows * (1 + width)].view(rows, 1 + width)
            area[:, 0] = inputs.masks.rows
            area[:, 1:] = inputs.masks.words
            end = self._masks_at + rows * (1 + width)
            written += [slice(_MASKS, _MASKS + 2), slice(self._masks_at, end)]
        return written

    def read(self, slot: torch.Tensor) -> SteppedInputs:
        """Return the step in a slot, as views of the slot."""
        head = slot[:_HEADER].tolist()
        words = head[6]
        flat = slot[_HEADER : _HEADER + words]
        inputs = SteppedInputs(
            self._layout, flat, StepSizes(*head[:5]), waits=bool(head[5]), for_masks=bool(head[_WAITS_FOR_MASKS])
        )
        rest = slot.numpy()[_HEADER + words :]
        recounts: list[Recount] = []
        edits: list[RowEdit] = []
        at, width = 0, self._edit_words
        for _ in range(head[7]):
            row, prompt, generated = rest[at : at + 3].tolist()
            ids = rest[at + 3 : at + 3 + prompt + generated].tolist()
            recounts.append(Recount(row, ids[:prompt], ids[prompt:]))
            at += 3 + prompt + generated
        for _ in range(head[8]):
            edits.append(RowEdit(int(rest[at]), rest[at + 1 : at + 1 + width]))
            at += 1 + width
        inputs.recounts, inputs.edits = tuple(recounts), tuple(edits)
        return inputs

    def read_late(self, slot: torch.Tensor, inputs: SteppedInputs) -> None:
        """Add the masks to a step that `read` has returned. The late inputs are in place already."""
        rows, width = slot[_MASKS : _MASKS + 2].tolist()
        if rows:
            area = slot[self._masks_at : self._masks_at + rows * (1 + width)].view(rows, 1 + width)
            inputs.masks = MaskRows(area[:, 0].to(torch.int64), area[:, 1:].contiguous())

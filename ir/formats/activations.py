"""The rounding of a linear's activations before it multiplies: part of a weight's format and of `quant_linear`."""

from dataclasses import dataclass

import torch

from ingot.ir.formats.elements import ELEMENTS, round_scale


@dataclass(frozen=True)
class Activations:
    """The rule by which activations are rounded to an element type.

    element    the element type, a key of `ELEMENTS`
    columns    how many elements of a token share a scale; 0: all of them
    scales     the dtype of scales that are computed in each step
    stored     whether the checkpoint stores a number for the tensor, the part "input_scale"
    dynamic    whether scales are computed in each step. If not, the stored number is the scale. If both, the computed
               scales are relative to the stored number, as in NVFP4.
    outliers   elements of at least this magnitude are not rounded, and scales leave them out; 0: there are none
    bound      the largest magnitude that a computed scale covers, larger elements saturate; 0: any
    factor     the number by which computed scales are multiplied once they are rounded to their dtype

    A rule never looks at other tokens of the step. So results do not depend on the batch.
    """

    element: str
    columns: int = 0
    scales: torch.dtype = torch.float32
    stored: bool = False
    dynamic: bool = True
    outliers: float = 0.0
    bound: float = 0.0
    factor: float = 1.0

    @property
    def whole_rows(self) -> bool:
        """Return whether the rounding of an element depends on all elements of its token."""
        return self.dynamic and not self.columns

    @property
    def separable(self) -> bool:
        """Return whether a rounded number is an element times a float32 scale, so that both can be stored."""
        return not self.outliers and self.factor == 1.0 and self.stored != self.dynamic

    def elements(self, x: torch.Tensor, stored: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x [T, K], in float32 or float64, as elements [T, K] and scales f32 [T, groups], for a separable rule.

        An element times its scale is the number that `rounded` returns. `stored` is as for `rounded`.
        """
        element = ELEMENTS[self.element]
        blocks = x.unflatten(-1, (-1, self.columns or x.shape[-1]))
        if not self.dynamic:
            assert stored is not None
            scale = stored.to(x.dtype).expand(*blocks.shape[:-1], 1)
        else:
            scale = self._scales(blocks, None)
        numbers = torch.where(scale == 0, torch.zeros_like(blocks), element.nearest(blocks / scale))
        return numbers.flatten(-2).to(element.storage), scale.squeeze(-1).float().contiguous()

    def _scales(self, blocks: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
        """Return the scale of each block, the last axis of `blocks`. Scales are relative to `outer`, if it is given."""
        element = ELEMENTS[self.element]
        # A block of zeros has no scale; the smallest normal number avoids a division by zero.
        least = torch.finfo(torch.float32).tiny
        most = blocks.abs().amax(-1, keepdim=True)
        most = most.clamp(max=self.bound) if self.bound else most
        scale = (most / element.high).clamp(min=least)
        return round_scale(scale if outer is None else scale / outer, self.scales, element)

    def rounded(self, x: torch.Tensor, stored: torch.Tensor | None) -> torch.Tensor:
        """Return x [T, K], in float32 or float64, with each element rounded. NaN stays NaN.

        `stored` is the number [1] that the checkpoint stores; None if the rule has none.
        """
        element = ELEMENTS[self.element]
        outer = None if stored is None else stored.to(x.dtype)
        if not self.dynamic:
            assert outer is not None
            return element.nearest(x / outer) * outer
        blocks = x.unflatten(-1, (-1, self.columns or x.shape[-1]))
        kept = blocks.abs() >= self.outliers if self.outliers else None
        inner = blocks if kept is None else blocks.masked_fill(kept, 0.0)
        scale = self._scales(inner, outer)
        scale = (scale if outer is None else scale * outer) * self.factor
        found = torch.where(scale == 0, torch.zeros_like(inner), element.nearest(inner / scale) * scale)
        found = torch.where(inner.isnan(), inner, found)
        return (found if kept is None else torch.where(kept, blocks, found)).flatten(-2)

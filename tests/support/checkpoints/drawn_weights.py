"""Random weights of tiny checkpoints, such that every bias and gain shows in the logits.

Default initialisation hides bugs: biases are 0, norm gains 1, logits nearly flat. Here matrices are N(0, 2.25/fan_in),
norm gains 1 + N(0, 0.3²) and biases N(0, 0.3²).
"""

import torch


class DrawnWeights:
    """Tensors by name, drawn one after the other from a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.tensors: dict[str, torch.Tensor] = {}

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def matrix(self, name: str, outputs: int, inputs: int, *, bias: bool = False, transposed: bool = False) -> None:
        """NAME.weight [outputs, inputs], or [inputs, outputs] if transposed, and NAME.bias."""
        drawn = self.randn(*((inputs, outputs) if transposed else (outputs, inputs)))
        self.tensors[f"{name}.weight"] = drawn * 1.5 / inputs**0.5
        if bias:
            self.tensors[f"{name}.bias"] = self.randn(outputs) * 0.3

    def stack(self, name: str, *shape: int) -> None:
        """NAME [count, outputs, inputs]."""
        self.tensors[name] = self.randn(*shape) * 1.5 / shape[-1] ** 0.5

    def norm(self, name: str, *shape: int, bias: bool = False, center: float = 1.0) -> None:
        """NAME.weight of this shape, around `center`, and NAME.bias."""
        self.tensors[f"{name}.weight"] = center + self.randn(*shape) * 0.3
        if bias:
            self.tensors[f"{name}.bias"] = self.randn(*shape) * 0.3

    def merge(self, name: str, *parts: str) -> None:
        """One matrix NAME.weight of the rows of PART.weight, which are taken away."""
        self.tensors[f"{name}.weight"] = torch.cat([self.tensors.pop(f"{part}.weight") for part in parts])

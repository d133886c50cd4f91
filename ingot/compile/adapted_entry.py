"""The entry `adapted`: the program of `main` with LoRA adapters, for steps in which a sequence uses one.

Steps without adapters run `main`, which is compiled as without the option. Both share weights, caches and most
executables.
"""

from collections.abc import Mapping
from dataclasses import replace

from ingot.ir.artifact.adapters import ADAPTED
from ingot.ir.errors import OptionError
from ingot.ir.features.adapters import ADAPTERS
from ingot.ir.program import Model
from ingot.passes.fuse_add_rms_norm import FuseAddRMSNorm

# The ranks for which kernels are compiled. A smaller rank is padded with zeros. Tensor cores need 16; a rank of 8
# halves the memory of small adapters.
RANKS = (8, 16, 32, 64, 128, 256, 512)
DEFAULT_LORA_RANK = 16  # vLLM's default of max_lora_rank
# Attention's kernels take no more sequences than this in a decode step, so more adapters cannot run at once.
_MOST = 512


def check_loras(max_loras: object, max_lora_rank: object, mesh: Mapping[str, int]) -> int:
    """Check the options for adapters, and return the rank to compile for: the next one of `RANKS`.

    Raises OptionError.
    """
    for name, value, least, most in (
        ("max_loras", max_loras, 0, _MOST),
        ("max_lora_rank", max_lora_rank, 1, RANKS[-1]),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise OptionError(f"{name} is {value!r:.80}", expected=f"a whole number from {least} to {most}")
    if max_loras and mesh:
        raise OptionError("max_loras with a mesh", expected="one device", hint="merge the adapter with --adapter")
    assert isinstance(max_lora_rank, int)
    return next(rank for rank in RANKS if rank >= max_lora_rank)


def with_adapted_entry(model: Model) -> Model:
    """Return the model with the entry `adapted`, a copy of `main` with the feature `adapters`.

    Raises OptionError if the model's steps run other entries too, or if it does not sample tokens.
    """
    main = model.entries["main"]
    if model.round != ("main",) or main.ending.name != "sample":
        raise OptionError(
            f"max_loras for a model whose steps run {', '.join(model.round)}, with the ending '{main.ending.name}'",
            expected="a model that samples tokens in the entry 'main' alone",
        )
    adapted = main.copy()
    adapted.name = ADAPTED
    adapted.ending = replace(main.ending, features=(*main.ending.features, ADAPTERS.name))
    # An expand comes between the add of a residual and the norm after it.
    expected = {name: count for name, count in model.expected.get("main", {}).items() if name != FuseAddRMSNorm.name}
    return replace(model, entries={**model.entries, ADAPTED: adapted}, expected={**model.expected, ADAPTED: expected})

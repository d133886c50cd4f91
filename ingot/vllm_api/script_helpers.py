"""Functions that vLLM's example scripts import next to `LLM`."""

import gc
import sys
from collections.abc import Sequence


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector, and how many it has. `prefix` names the vector."""
    shown = ", ".join(f"{float(one):g}" for one in embeds[:16])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 16 else ''}] (size={len(embeds)})")


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Return memory of deleted `LLM` objects to the machine. Ingot has no distributed environment to clean up.

    `shutdown_ray` has no effect, because Ingot does not use Ray.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

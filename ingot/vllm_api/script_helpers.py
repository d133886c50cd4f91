"""Functions that vLLM's example scripts import next to `LLM`."""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from ingot.ir.errors import RequestError


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector, and how many it has. `prefix` names the vector."""
    shown = ", ".join(f"{float(one):g}" for one in embeds[:16])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 16 else ''}] (size={len(embeds)})")


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """Return a chat template: the text of a file, or `chat_template` itself if it is one and no path. None: None.

    Raises RequestError if the file cannot be read.
    """
    if chat_template is None or (isinstance(chat_template, str) and is_template(chat_template)):
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        where = str(chat_template)[:200]
        raise RequestError(f"the chat template cannot be read: {error}", where=where, expected="a file") from None


def is_template(text: str) -> bool:
    """Return whether a text is a Jinja template, and not a path: paths have no braces and no line ends."""
    return any(mark in text for mark in "{}\n")


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Return memory of deleted `LLM` objects to the machine. Ingot has no distributed environment to clean up.

    `shutdown_ray` has no effect, because Ingot does not use Ray.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

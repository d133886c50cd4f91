"""The engines that others make and that Ingot is measured beside."""

from dataclasses import dataclass
from pathlib import Path

# Where the compilers keep what they made that more than one of them calls.
_COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Peer:
    """`name` is that of its package, and stands before its figures; `title` is how its makers write it. `caches` are
    the variables that say where it and the compilers that it calls keep what they made."""

    name: str
    title: str
    caches: tuple[str, ...]

    @property
    def child(self) -> Path:
        """The script that measures it, in a process of its own."""
        return Path(__file__).with_name(f"{self.name}_child.py")

    @property
    def prefix(self) -> str:
        """Of its figures."""
        return f"{self.name}_"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm", "vLLM", ("VLLM_CACHE_ROOT", *_COMPILER_CACHES)),
        Peer(
            "sglang",
            "SGLang",
            ("SGLANG_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "TVM_FFI_CACHE_DIR", "CUTE_DSL_CACHE_DIR", *_COMPILER_CACHES),
        ),
    )
}

"""The engines that others make and that Ingot is measured beside, and the names of their figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from results import Figure

# Where the compilers keep what they made that more than one of them calls.
_COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Peer:
    """`name` is that of its package, and begins the names of its figures; `title` is how its makers write it. `caches`
    are the variables that say where it and the compilers that it calls keep what they made."""

    name: str
    title: str
    caches: tuple[str, ...]

    @property
    def child(self) -> Path:
        """The script that measures it, in a process of its own."""
        return Path(__file__).with_name(f"{self.name}_child.py")

    def figure(self, version: str, name: str) -> str:
        """The name of a figure of this peer's. Several versions of it may stand in one result."""
        return f"{self.name}_{version}_{name}"

    def versions(self, figures: Mapping[str, Figure]) -> list[str]:
        """Those that were measured, in the order of the figures."""
        parts = [name.split("_", 2) for name in figures]
        return list(dict.fromkeys(part[1] for part in parts if part[0] == self.name and len(part) > 2))

    def best(self, figures: Mapping[str, Figure], name: str) -> tuple[str, Figure] | None:
        """The version that did best in a figure, and the figure; None where none was measured by it."""
        named = {version: self.figure(version, name) for version in self.versions(figures)}
        found = {version: figures[one] for version, one in named.items() if one in figures}
        if not found:
            return None
        return min(found.items(), key=lambda one: -one[1].value if one[1].more_is_better else one[1].value)


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

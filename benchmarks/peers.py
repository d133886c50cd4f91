"""The other engines that Ingot is compared with, and the names of their figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from results import Figure

# Cache variables of compilers that several peers call.
_COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Peer:
    """`name` is the peer's package, and the prefix of its figures' names; `title` is its makers' spelling. `caches` are
    the variables that set its cache folders and those of the compilers that it calls."""

    name: str
    title: str
    caches: tuple[str, ...]

    @property
    def child(self) -> Path:
        """Return the script that measures it, in a process of its own."""
        return Path(__file__).with_name(f"{self.name}_child.py")

    def figure(self, version: str, name: str) -> str:
        """Return the name of one of this peer's figures. One result may have several versions of the peer."""
        return f"{self.name}_{version}_{name}"

    def versions(self, figures: Mapping[str, Figure]) -> list[str]:
        """Return the measured versions, in the order of the figures."""
        parts = [name.split("_", 2) for name in figures]
        return list(dict.fromkeys(part[1] for part in parts if part[0] == self.name and len(part) > 2))

    def best(self, figures: Mapping[str, Figure], name: str) -> tuple[str, Figure] | None:
        """Return the version with the best value of a figure, and the figure; None if no version has it."""
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

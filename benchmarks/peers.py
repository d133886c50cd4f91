"""The other engines, called peers, that Ingot is compared with, and the names of their figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from results import Figure

# Cache variables of compilers that several peers call.
_COMPILER_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Peer:
    """Another engine to compare with.

    `name` is its package, and the prefix of its figures' names. `title` is its name as its makers write it. `caches`
    has the names of environment variables. They set the cache folders of the engine and of its compilers.
    """

    name: str
    title: str
    caches: tuple[str, ...]

    @property
    def child(self) -> Path:
        """Return the path of the script that measures this engine. It runs in a separate process."""
        return Path(__file__).with_name(f"{self.name}_child.py")

    def figure(self, version: str, name: str) -> str:
        """Return the name of the figure `name` for one version of this engine. A result may have several versions."""
        return f"{self.name}_{version}_{name}"

    def versions(self, figures: Mapping[str, Figure]) -> list[str]:
        """Return the versions of this engine that have figures in a result, in the order of `figures`."""
        parts = [name.split("_", 2) for name in figures]
        return list(dict.fromkeys(part[1] for part in parts if part[0] == self.name and len(part) > 2))

    def best(self, figures: Mapping[str, Figure], name: str) -> tuple[str, Figure] | None:
        """Return the version of this engine with the best value of the figure `name`, and this figure.

        Return None if no version has the figure.
        """
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

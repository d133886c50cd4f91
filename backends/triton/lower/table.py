"""Every lowering of a single call, by the printed name of what it lowers."""

from collections.abc import Mapping

from ingot.backends.triton.lower.call import Lowering

_MODULES: tuple[Mapping[str, Lowering], ...] = ()
LOWERINGS: Mapping[str, Lowering] = {name: one for module in _MODULES for name, one in module.items()}

"""`ingot bisect`: who is to blame when an artifact computes the wrong thing.

`driver` asks in order: `programs` looks for a pass, a rewrite or the definition that changes what the model means;
`execution` for a weight, a kernel, a region or an instruction that does not do what the programs say.
"""

from ingot.debug.bisect.driver import bisect
from ingot.debug.bisect.verdict import Kind, Verdict

__all__ = ["Kind", "Verdict", "bisect"]

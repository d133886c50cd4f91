"""`ingot bisect`: find the part that makes an artifact compute wrong results.

`driver` checks in order. First `programs` looks for a pass, a rewrite or a definition that changes what the model
computes. Then `execution` looks for a weight, a kernel, a region or an instruction that does not compute what the
programs say.
"""

from ingot.debug.bisect.driver import bisect
from ingot.debug.bisect.verdict import Kind, Verdict

__all__ = ["Kind", "Verdict", "bisect"]

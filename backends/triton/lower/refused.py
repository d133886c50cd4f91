"""The exception that a lowering raises for a call without a kernel. This module works without Triton."""


class Refused(Exception):
    """Raised when no kernel supports a call. `ingot inspect --choices` shows the message as the reason."""

"""The exception of lowerings for calls without a kernel. The module does not import Triton, which some tools lack."""


class Refused(Exception):
    """A lowering has no kernel for a call. `ingot inspect --choices` shows the message as the reason."""

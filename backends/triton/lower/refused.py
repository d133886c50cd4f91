"""What a lowering raises for a call that it does not take. It imports no Triton, for tools that only count."""


class Refused(Exception):
    """There is no kernel for a call; the message is the reason, which `ingot inspect --choices` shows."""

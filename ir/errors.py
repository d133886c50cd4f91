"""The one error hierarchy. Every message says what is wrong, where, what was expected, and what to do."""


class IngotError(Exception):
    """Base of all errors that Ingot raises on purpose.

    `exit_code` is what a command ends with: 2 when the user's input is at fault, 1 when Ingot is.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", expected: str = "", hint: str = "") -> None:
        self.what, self.where, self.expected, self.hint = what, where, expected, hint
        parts = [what]
        if where:
            parts.append(f"  where:    {where}")
        if expected:
            parts.append(f"  expected: {expected}")
        if hint:
            parts.append(f"  to do:    {hint}")
        super().__init__("\n".join(parts))


class ConfigError(IngotError):
    """A model configuration that is missing, malformed or not supported."""


class CheckpointError(IngotError):
    """A checkpoint whose files or tensors cannot be used."""


class HubError(IngotError):
    """A checkpoint's name that the Hugging Face hub does not know, or whose files cannot be had from there."""


class OptionError(IngotError):
    """An option of a command, of `compile_model` or of a pass that is unknown or out of range."""


class ParseError(IngotError):
    """Text that is not a program; `where` holds line and column."""


class TargetError(IngotError):
    """A machine that cannot be compiled for, or that an artifact was not compiled for."""


class ArtifactError(IngotError):
    """A folder that is no artifact, or a damaged or unfitting one."""


class MismatchError(ArtifactError):
    """An artifact that does not compute what it did when it was compiled."""


class UnknownPassError(OptionError):
    """A pass that neither Ingot nor an installed package has; `name` is what was asked for."""

    def __init__(self, name: str, *, where: str = "", expected: str = "", hint: str = "") -> None:
        self.name = name
        super().__init__(f"unknown pass '{name}'", where=where, expected=expected, hint=hint)


class UserPassError(IngotError):
    """A pass of another package that raised, made no valid program, or broke its numerics contract."""


class RequestError(IngotError):
    """A request for tokens that cannot be served: bad prompt, token ids or sampling parameters."""


class StepMemoryError(IngotError):
    """A step for which the device has no memory left. Some of its instructions may have run."""


class OutputError(IngotError):
    """A place that cannot be written to, or where something stands already."""


class InternalError(IngotError):
    """A promise that Ingot broke: a pass, a verifier rule or a backend. Please report it."""

    exit_code = 1


class VerifyError(InternalError):
    """A program that breaks a rule of its stage."""


class PassError(InternalError):
    """A pass that failed or matched less than the model promises."""


class NumericsError(InternalError):
    """A pass that broke its numerics contract on sample inputs."""


class BackendError(InternalError):
    """A backend that failed to emit or load an executable."""

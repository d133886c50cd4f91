"""All errors of Ingot. Every message says what is wrong, where, what was expected, and what to do."""


class IngotError(Exception):
    """Base class of all errors that Ingot raises on purpose.

    `exit_code` is the exit status of a command that ends in this error. It is 2 for bad input of the user, and 1 for a
    fault of Ingot.
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


class AdapterError(IngotError):
    """A LoRA adapter whose files cannot be used, or that belongs to another base model."""


class CalibrationError(IngotError):
    """A calibration text that cannot be used, or activations from which no weights can be quantized."""


class HubError(IngotError):
    """A checkpoint that the Hugging Face hub does not know, or does not let Ingot download."""


class OptionError(IngotError):
    """An unknown option, or an option out of range: of a command, of `compile_model`, or of a pass."""


class ParseError(IngotError):
    """Text that is not a valid program, type or recipe. `where` names the line and column."""


class TargetError(IngotError):
    """A machine that Ingot cannot compile for, or a machine other than the one that an artifact was compiled for."""


class ArtifactError(IngotError):
    """A folder that is not an artifact, or an artifact that is damaged or cannot be used here."""


class MismatchError(ArtifactError):
    """An artifact with results that differ from the results recorded at compile time."""


class UnknownPassError(OptionError):
    """A pass name that neither Ingot nor an installed package defines. `name` is that name."""

    def __init__(self, name: str, *, where: str = "", expected: str = "", hint: str = "") -> None:
        self.name = name
        super().__init__(f"unknown pass '{name}'", where=where, expected=expected, hint=hint)


class UserPassError(IngotError):
    """A pass of another package that raised an exception, made an invalid program, or changed results too much."""


class UserBackendError(IngotError):
    """A backend of another package that does not load, breaks a rule of backends, or raised an exception.

    `backend` is its name. The message names its package.
    """

    def __init__(
        self, what: str, *, where: str = "", expected: str = "", hint: str = "fix the package", backend: str = ""
    ) -> None:
        self.backend = backend
        super().__init__(what, where=where, expected=expected, hint=hint)


class RequestError(IngotError):
    """A request for tokens that cannot be served: bad prompt, token ids or sampling parameters."""


class GenerationError(IngotError):
    """A call of which no request got tokens or a vector, because the model's numbers were not finite, for example."""

    exit_code = 1


class QueueFullError(RequestError):
    """A request that the server does not queue, because too many wait already. The caller may try it again later."""


class EngineDeadError(IngotError):
    """A request that ended, or cannot begin, because the engine process is not running."""

    exit_code = 1


class RankError(IngotError):
    """A process of a mesh that ended, stopped or failed, so that the other ranks ended too."""

    exit_code = 1


class StepMemoryError(IngotError):
    """A step that ran out of device memory. Some of its instructions may have run."""


class ExportError(IngotError):
    """A model, or a part of one, that an export's format cannot express."""


class ConversionError(IngotError):
    """A model that a conversion into another architecture cannot keep, or a size that its heads do not allow."""


class OutputError(IngotError):
    """An output path that cannot be written, or that exists already."""


class InternalError(IngotError):
    """A bug in Ingot: in a pass, a verifier rule or a backend. Please report it."""

    exit_code = 1


class VerifyError(InternalError):
    """A program that breaks a rule of its pipeline stage, or a call with arguments that its op does not accept."""


class PassError(InternalError):
    """A pass that failed, or that rewrote fewer places than the model's layers imply."""


class NumericsError(InternalError):
    """A pass that changed results on sample inputs more than it declares (exact, rounding or lossy)."""


class BackendError(InternalError):
    """A backend that failed to emit or load an executable."""

"""The sampling fields of a model's generation_config.json."""

from pathlib import Path

from ingot.ir.errors import ArtifactError, RequestError
from ingot.runtime.sampling_params import SamplingParams

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling_params(artifact: Path) -> SamplingParams:
    """Return SamplingParams with the values of an artifact's generation_config.json, for requests without params.

    Fields that the file lacks keep the class's defaults. Raises ArtifactError for an invalid value.
    """
    from ingot.runtime.tokenizer import read_json

    file = artifact / "tokenizer" / "generation_config.json"
    config = read_json(file)
    try:
        return SamplingParams(**{name: config[name] for name in _FIELDS if config.get(name) is not None})
    except RequestError as error:
        raise ArtifactError(error.what, where=str(file), expected=error.expected) from None

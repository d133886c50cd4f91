"""The sampling fields of a generation_config.json: of the model, or of a folder that an operator names."""

from pathlib import Path

from ingot.ir.artifact.manifest_file import tokenizer_folder
from ingot.ir.errors import ArtifactError, OptionError, RequestError
from ingot.runtime.params.sampling_params import SamplingParams

# Names in the file, and those of the fields; vLLM takes the same ones.
_FIELDS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
_FILE = "generation_config.json"
OF_MODEL = "auto"
_WITHOUT = ("none", "vllm")  # vLLM's word, as in its command lines


def default_sampling_params(artifact: Path) -> SamplingParams:
    """Return SamplingParams with the values of an artifact's generation_config.json, for requests without params.

    Fields that the file lacks keep the class's defaults. Raises ArtifactError for an invalid value.
    """
    return _read(tokenizer_folder(artifact) / _FILE)


def chosen_sampling_params(artifact: Path, source: str) -> SamplingParams:
    """Return SamplingParams for requests without params, from the `source` that an operator has chosen.

    source   "auto": the artifact's file, as in `default_sampling_params`; "none" or "vllm": the class's defaults; or
             else the path of a folder with a generation_config.json

    Raises OptionError if the folder has no such file, ArtifactError if a file cannot be read or has an invalid value.
    """
    if source == OF_MODEL:
        return default_sampling_params(artifact)
    if source in _WITHOUT:
        return SamplingParams()
    file = Path(source) / _FILE
    if not file.is_file():
        expected = f'"{OF_MODEL}", "none", or a folder with a {_FILE}'
        raise OptionError(f"--generation-config is {source[:200]!r}, and {file} is not there", expected=expected)
    return _read(file)


def _read(file: Path) -> SamplingParams:
    from ingot.runtime.text.tokenizer import read_json

    config = read_json(file)
    try:
        return SamplingParams(
            **{field: config[name] for name, field in _FIELDS.items() if config.get(name) is not None}
        )
    except RequestError as error:
        raise ArtifactError(error.what, where=str(file), expected=error.expected) from None

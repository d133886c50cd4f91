"""Options of LoRA adapters: `--lora-modules` and `--adapter-dir`."""

from collections.abc import Sequence
from pathlib import Path

from ingot.ir.errors import OptionError


def read_lora_modules(given: Sequence[str], model_names: Sequence[str]) -> dict[str, Path]:
    """Return the folders of the adapters of `--lora-modules`, NAME=FOLDER each, by name.

    `model_names` are the names of the model, which an adapter cannot have. Raises OptionError.
    """
    found: dict[str, Path] = {}
    for one in given:
        name, equals, folder = one.partition("=")
        if not (name and equals and folder) or name in found or name in model_names:
            raise OptionError(f"{one!r:.80}", where="--lora-modules", expected="NAME=FOLDER, each name once")
        found[name] = Path(folder)
    return found


def checked_folder(folder: Path) -> Path:
    """Return the folder of `--adapter-dir` as an absolute path without links. Raises OptionError if it is none."""
    if not folder.is_dir():
        raise OptionError(f"{str(folder)!r:.200} is no folder", where="--adapter-dir", expected="a folder")
    return folder.resolve()

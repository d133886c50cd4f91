"""Families whose tensors or fields have names of their own: one file a kin, each found by its being here.

A file has FAMILIES, and for specs that only these families have what test_mutations.py asks of every field: MUTATIONS,
and SIZES, STORAGE, ROUNDING, PARTS and NAMES as decoder_mutations.py has them.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

import torch
from tiny_weights import like_llama

from families.family import Config, Family

_FILES = [
    importlib.import_module(f"families.{found.name}")
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name)
    if found.name != "family"
]
FAMILIES: Mapping[str, Family] = {family.model_type: family for file in _FILES for family in file.FAMILIES}


def of_all_files(name: str) -> list[Any]:
    """The items of the tuples, or of the mappings, that files have under a name."""
    found = [getattr(file, name, ()) for file in _FILES]
    return [item for one in found for item in (one.items() if isinstance(one, Mapping) else one)]


def weights(config: Config, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint with this configuration, of whatever family."""
    family = FAMILIES.get(config["model_type"])
    return (family.weights if family else like_llama)(config, torch.Generator().manual_seed(seed))

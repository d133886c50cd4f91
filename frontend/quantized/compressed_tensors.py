"""The method "compressed-tensors", as llm-compressor writes it: groups of modules, each with a scheme and a format.

Read from compressed-tensors 0.20: `quantization/quant_config.py`, `quant_args.py`, `compressors/`, and
`utils/match.py`. A scheme's weights and activations decide what is stored: `weight` of eight bits, or `weight_packed`,
with `weight_scale`, `weight_zero_point`, `weight_g_idx` and global scales.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ingot.frontend.quantized.compressed_weights import FORMATS, Args, read_weight
from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.rotations import read_rotations, with_rotations
from ingot.frontend.quantized.stored import Logical, Stored, Weight
from ingot.ir.errors import ConfigError

_STORED = ("weight_packed", "weight_scale")
_SPARSE = "a checkpoint without sparsity: Ingot has no kernels for sparse weights"


@dataclass(frozen=True)
class Group:
    """A group of modules with one scheme.

    name          its name in the config
    matches       whether it names a module
    everything    whether it names all linears
    weights       how weights are stored
    activations   how the inputs of linears are rounded; None: not at all
    format        the name of the storage format, such as "pack-quantized"
    """

    name: str
    matches: Callable[[str], bool]
    everything: bool
    weights: Args
    activations: Args | None
    format: str


def _check_cache(cache: Fields) -> None:
    """Raise ConfigError unless `kv_cache_scheme` is eight bits with static scales, for a tensor or for each head.

    `ingot.frontend.cache_scales` reads the scales.
    """
    cache.choice("type", ("int", "float"), "int")
    cache.choice("num_bits", (8,), 8)
    cache.choice("strategy", ("tensor", "attn_head"), "tensor")
    cache.choice("dynamic", (False,), False)
    cache.choice("symmetric", (True,), True)
    cache.skip("group_size", "block_structure", "actorder", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    cache.end()


def read_compressed_tensors(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    whole = fields.get("format", str, "dense")
    fields.choice("quantization_status", ("compressed", "frozen", "initialized", "calibration"), "compressed")
    ignored = matcher(fields.names("ignore"))
    if (cache := fields.object("kv_cache_scheme")) is not None:
        _check_cache(cache)
    sparsity = fields.object("sparsity_config")
    if sparsity is not None and sparsity.values and sparsity.values.get("format") != "dense":
        raise fields.error("sparsity_config", f"is {sparsity.values!r:.80}", _SPARSE)
    turned = fields.object("transform_config")
    rotations = () if turned is None else read_rotations(turned)
    fields.skip("quant_method", "global_compression_ratio", "version")
    # A config may describe the cache or the rotations alone.
    alone = cache is not None or (turned is not None and bool(turned.values))
    groups = [] if alone and not fields.values.get("config_groups") else _groups(fields, whole)
    fields.skip("config_groups")
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in sorted({module for suffix in _STORED for module in stored.modules(suffix)}):
            if ignored(module):
                raise stored.error(f"{module} is quantized, but the quantization_config ignores it", "floats")
            group = _group_of(module, groups)
            if group is None:
                raise stored.error(
                    f"{module} is quantized, but no group of the quantization_config names it", "a group"
                )
            weights[f"{module}.weight"] = read_weight(stored, module, group.weights, group.activations, group.format)
        return with_rotations(stored, weights, rotations)

    return read


def _group_of(module: str, groups: list[Group]) -> Group | None:
    """Return the group of a module: one that names it, or else one for all linears."""
    named = next((one for one in groups if one.matches(module)), None)
    return named or next((one for one in groups if one.everything), None)


def _groups(fields: Fields, whole: str) -> list[Group]:
    listed = fields.object("config_groups")
    if listed is None or not listed.values:
        raise fields.error("config_groups", "is missing", "an object of groups")
    found = []
    for name in listed.values:
        group = listed.object(name)
        if group is None:
            raise listed.error(name, "is null", "a group")
        weights, inputs = group.object("weights"), group.object("input_activations")
        if (outputs := group.object("output_activations")) is not None:
            raise group.error("output_activations", f"is {outputs.values!r:.80}", "no rounding of results")
        if weights is None:
            raise group.error("weights", "is null", "a scheme of weights")
        targets = group.names("targets")
        classes = [one for one in targets if not one.startswith("re:") and "." not in one and one[:1].isupper()]
        if unknown := sorted(set(classes) - {"Linear"}):
            raise group.error(
                "targets", f"names the class '{unknown[0]}'", "Linear, names of modules, re: and a pattern"
            )
        format = group.get("format", str, whole)
        _check_format(group, format)
        found.append(
            Group(
                name,
                matcher([one for one in targets if one != "Linear"]),
                "Linear" in targets,
                Args.of(weights),
                None if inputs is None else Args.of(inputs),
                format,
            )
        )
        group.end()
    return found


def _check_format(group: Fields, format: str) -> None:
    """Raise ConfigError for a storage format that is not read."""
    if format in FORMATS:
        return
    hint = _SPARSE if "24" in format or "sparse" in format else ", ".join(FORMATS)
    raise ConfigError(
        f"weights in the format '{format}' cannot be read",
        where=group.where,
        expected=hint,
        hint="use the checkpoint of the same model in another format, or the original one",
    )

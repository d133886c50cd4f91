"""Read the config fields of mixtures of experts: how many experts there are, how many a token chooses, and groups."""

from typing import Any

from ingot.ir.errors import ConfigError
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec
from ingot.models.blocks.feed_forward import GatedNames, GatedSpec
from ingot.models.config import ConfigReader

# Bounds the tensors of a layer; the most experts of a published model are some 512.
MOST_EXPERTS = 1 << 14


def read_counts(
    config: ConfigReader, experts: str, top_k: str = "num_experts_per_tok", others: int = 0
) -> tuple[int, int]:
    """Return the number of experts, and how many of them a token chooses. The arguments name the config fields.

    A token may also choose one of `others` further experts, which are not in that number. Raises ConfigError if it
    would choose more experts than there are.
    """
    if experts == "num_experts" and config.fields.get(experts) is None and "num_local_experts" in config.fields:
        experts = "num_local_experts"  # transformers 5 writes some families' field by this name
    count, chosen = config.integer(experts, most=MOST_EXPERTS), config.integer(top_k)
    if chosen > count + others:
        more = f" and {others} more" if others else ""
        raise config.error(top_k, f"at most {count + others}, the number of experts in '{experts}'{more}")
    return count, chosen


def read_groups(config: ConfigReader, experts: int, top_k: int, best: int = 2) -> dict[str, Any]:
    """Return the arguments of RouterSpec for groups, from the fields `n_group` and `topk_group`.

    A group's score is the sum of its `best` best. Raises ConfigError if the groups do not divide the experts, or if the
    kept groups have fewer experts than a token chooses.
    """
    groups, kept = config.integer("n_group", 1), config.integer("topk_group", 1)
    if experts % groups:
        raise config.error("n_group", f"a divisor of {experts}, the number of experts")
    if kept > groups:
        raise config.error("topk_group", f"at most {groups}, the number of groups in 'n_group'")
    size = experts // groups
    if kept < groups and size < best:
        raise config.error("n_group", f"at most {experts // best}: a group's score is the sum of {best} experts")
    if top_k > kept * size:
        raise ConfigError(
            f"a token chooses {top_k} experts of {kept} groups with {size} each",
            where=config.source,
            expected=f"'topk_group' of at least {-(-top_k // size)}",
        )
    if kept == groups:  # all experts are open to the choice
        return {}
    return {"groups": groups, "kept_groups": kept, "group_best": best}


def read_sigmoid_experts(config: ConfigReader, experts_field: str, shared: int, activation: str) -> ExpertsSpec:
    """Return the spec of experts as in DeepSeek-V3: sigmoid scores, a bias for the choice, groups, a shared part.

    experts_field   the field with the number of experts
    shared          the shared part is as wide as this number of experts; 0: no shared part
    activation      how experts join gate and up
    """
    experts, top_k = read_counts(config, experts_field)
    router = RouterSpec(
        top_k,
        scores="sigmoid",
        renormalize=config.flag("norm_topk_prob", True),
        least_sum=1e-20,  # transformers, modeling_deepseek_v3.py
        choice_bias="gate.e_score_correction_bias",
        scale=config.number("routed_scaling_factor"),
        wide=True,
        **read_groups(config, experts, top_k),
    )
    width = config.integer("moe_intermediate_size")
    part = GatedSpec(shared * width, activation, names=GatedNames("shared_experts"))
    return ExpertsSpec(experts, width, router, activation, shared=SharedSpec(part) if shared else None)


def read_layer_indices(config: ConfigReader, field: str, layers: int) -> tuple[int, ...] | None:
    """Return the value of a field that must be a list of layer indices, which count from 0; None if it is missing."""
    value = config.fields.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or any(
        not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < layers for index in value
    ):
        raise config.error(field, f"a list of layers from 0 to {layers - 1}")
    return tuple(value)

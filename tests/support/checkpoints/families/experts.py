"""Mutations of mixtures of experts, whatever the family."""

from dataclasses import replace

from mutations import Change, Mutation, each, every, some, without

from families.family import Family
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.expert_names import ExpertNames
from ingot.models.blocks.experts import ExpertsSpec, RouterSpec, SharedSpec

FAMILIES: tuple[Family, ...] = ()
MUTATIONS = (
    Mutation(
        "one expert less chosen",
        "RouterSpec.top_k",
        some(RouterSpec, lambda router: router.top_k > 1 and router.jitter is None),
        each(RouterSpec, lambda router: replace(router, top_k=max(1, router.top_k - 1))),
    ),
    without(RouterSpec, "renormalize", False),
    Mutation(
        "weights renormalized",
        "RouterSpec.renormalize",
        some(RouterSpec, lambda router: not router.renormalize and router.jitter is None and router.top_k > 1),
        every(RouterSpec, renormalize=True),
    ),
    without(RouterSpec, "scores", "softmax"),
    without(RouterSpec, "scale", 1.0),
    without(RouterSpec, "bias", False),
    without(RouterSpec, "choice_bias", None),
    Mutation(
        "one group more is kept",
        "RouterSpec.kept_groups",
        some(RouterSpec, lambda router: router.groups > 1),
        each(RouterSpec, lambda router: replace(router, kept_groups=min(router.groups, router.kept_groups + 1))),
    ),
    Mutation(
        "no groups",
        "RouterSpec.groups",
        some(RouterSpec, lambda router: router.groups > 1),
        every(RouterSpec, groups=1),
    ),
    Mutation(
        "groups by their best expert alone",
        "RouterSpec.group_best",
        some(RouterSpec, lambda router: router.groups > 1 and router.group_best > 1),
        every(RouterSpec, group_best=1),
    ),
    Mutation(
        "a gate that is not clamped",
        "ExpertsSpec.activation",
        some(ExpertsSpec, lambda one: one.activation == "clamped"),
        every(ExpertsSpec, activation="silu"),
    ),
    Mutation(
        "a limit of 7",
        "ExpertsSpec.limit",
        some(ExpertsSpec, lambda one: one.activation == "clamped"),
        every(ExpertsSpec, limit=7.0),
    ),
    Mutation(
        "an alpha of 1.702",
        "ExpertsSpec.alpha",
        some(ExpertsSpec, lambda one: one.activation == "clamped"),
        every(ExpertsSpec, alpha=1.702),
    ),
    without(ExpertsSpec, "bias", False),
    without(AttentionSpec, "sinks", False),
    without(ExpertsSpec, "shared", None),
    without(SharedSpec, "gate", None),
)
SIZES: dict[str, Change] = {
    "ExpertsSpec.width": each(ExpertsSpec, lambda one: replace(one, width=2 * one.width)),
    "ExpertsSpec.experts": each(ExpertsSpec, lambda one: replace(one, experts=one.experts - 1)),
}
STORAGE = ("ExpertsSpec.names", "ExpertsSpec.place", "RouterSpec.stored", "RouterSpec.one_row")
# A sum that small needs logits below -20, and scores that are equal by rounding logits above 17.
ROUNDING = ("RouterSpec.wide", "RouterSpec.least_sum", "RouterSpec.by_logits")
PARTS = ("ExpertsSpec.router", "SharedSpec.mlp")
NAMES = (ExpertNames,)

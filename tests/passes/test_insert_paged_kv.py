"""insert-paged-kv: attention becomes attention over a paged cache, which is a state of the program."""

from collections.abc import Callable

import pytest
import torch
from tiny import TINY

from ingot.ir import ops
from ingot.ir.artifact.record import PassRecord
from ingot.ir.errors import OptionError, PassError, VerifyError
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, named_arguments
from ingot.ir.text import print_program
from ingot.ir.verify import verify
from ingot.passes.insert_paged_kv import InsertPagedKV

Apply = Callable[..., tuple[Program, PassRecord]]

TWO_LAYERS = """program main stage=NORMAL
dim T in [1, 8]
input x: f32[T, 2, 8]
input positions: i32[T]
input token_seqs: i32[T]
%attention = ingot.attention(%x, %x, %x, %positions, %token_seqs, scale=0.5, layer=0) : f32[T, 2, 8]
%attention_1 = ingot.attention(%attention, %x, %x, %positions, %token_seqs, scale=0.5, layer={layer}) : f32[T, 2, 8]
return y=%attention_1
"""


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(InsertPagedKV(), max_seq_len=33, max_batch=4)
    assert record.matches == 2 and record.options == {"page_size": 16, "kv_cache_dtype": "auto", "per_token": False}


@pytest.mark.parametrize(("page_size", "width"), [(1, 33), (8, 5), (16, 3), (32, 2), (33, 1), (64, 1)])
def test_page_size(apply: Apply, page_size: int, width: int) -> None:
    program, record = apply(InsertPagedKV(page_size), TWO_LAYERS.format(layer=1), max_seq_len=33, max_batch=4)
    assert record.options == {"page_size": page_size, "kv_cache_dtype": "auto", "per_token": False}
    assert program.dims["P"].hi == width and program.dims["B"].hi == 4
    assert {name: spec.type.shape for name, spec in program.states.items()} == {
        f"kv.{layer}": ("pages", 2, page_size, 2, 8) for layer in (0, 1)
    }
    assert all(spec.type.dtype is torch.float32 for spec in program.states.values())


TWO_WIDTHS = """program main stage=NORMAL
dim T in [1, 8]
input q: bf16[T, 4, 8]
input k: bf16[T, 2, 8]
input v: bf16[T, 2, 5]
input positions: i32[T]
input token_seqs: i32[T]
%attention = ingot.attention(%q, %k, {v}, %positions, %token_seqs, scale=0.5, layer=0{option}) : bf16[T, 4, 5]
return y=%attention
"""


@pytest.mark.parametrize("shared", [False, True])
def test_a_cache_has_the_form_of_keys_and_values(apply: Apply, shared: bool) -> None:
    text = TWO_WIDTHS.format(v="None" if shared else "%v", option=", value_width=5" if shared else "")
    program, _ = apply(InsertPagedKV(), text, max_seq_len=33, max_batch=4)
    assert program.states["kv.0"].type.shape == ("pages", 1, 16, 2, 8 if shared else 13)
    (append,) = program.calls(ops.kv_append.overload)
    (attention,) = program.calls(ops.paged_attention.overload)
    assert (append.args[2] is None) == shared and attention.kwargs.get("value_width") == (5 if shared else None)
    assert str(attention.meta["type"]) == "bf16[T, 4, 5]"
    assert print_program(parse_program(print_program(program))) == print_program(program)


CHOSEN = """program main stage=NORMAL
dim T in [1, 8]
input q: f32[T, 4, 8]
input k: f32[T, 1, 8]
input keys: f32[T, 1, 6]
input others: f32[T, 1, 6]
input sinks: f32[4]
input index_q: f32[T, 3, 6]
input weights: f32[T, 3]
input choice: i32[T, 5]
input positions: i32[T]
input token_seqs: i32[T]
%one = ingot.choose_positions(%index_q, %keys, %weights, %positions, %token_seqs, top_k=5, layer=0) : i32[T, 5]
%two = ingot.choose_positions(%index_q, %keys, %weights, %positions, %token_seqs, top_k=3, layer=0) : i32[T, 3]
%a = ingot.attention(%q, %k, None, %positions, %token_seqs, None, None, %one, scale=0.5, layer=0, value_width=8) : f32[T, 4, 8]
%b = ingot.attention(%a, %k, None, %positions, %token_seqs, None, None, %one, scale=0.5, layer=1, value_width=8) : f32[T, 4, 8]
%c = ingot.attention(%b, %k, None, %positions, %token_seqs, None, None, %two, scale=0.5, layer=2, value_width=8) : f32[T, 4, 8]
return y=%c
"""  # noqa: E501  # programs as text have a call a line


def test_attention_over_chosen_positions(apply: Apply) -> None:
    """Calls share choices, and choices share the cache of keys. Where all positions are chosen, there is no choice."""
    for longest, sparse, states in ((6, 3, 4), (5, 1, 4), (3, 0, 3)):
        program, record = apply(InsertPagedKV(), CHOSEN, max_seq_len=longest, max_batch=4)
        assert record.matches == 3 and len(program.states) == states
        assert len([*program.calls(ops.sparse_attention.overload)]) == sparse
        assert len([*program.calls(ops.paged_attention.overload)]) == 3 - sparse
        choices = [*program.calls(ops.paged_choose_positions.overload)]
        assert [choice.kwargs["top_k"] for choice in choices] == [5, 3][2 - len(choices) :]
        assert not [*program.calls(ops.choose_positions.overload)]
        if states == 4:
            assert program.states["index.0"].group == "full" and choices[0].args[1] is choices[-1].args[1]
        assert print_program(parse_program(print_program(program))) == print_program(program)


ROWS = "%positions, %token_seqs, None, None, "
OPTION = "%one, scale=0.5, {}layer=0"


@pytest.mark.parametrize(
    ("old", "new", "error", "said"),
    [
        ("None, None, %one", "%sinks, None, %one", PassError, "over chosen positions with sinks"),
        (OPTION.format(""), OPTION.format('mask="window_4", '), PassError, "with mask window_4"),
        (OPTION.format(""), OPTION.format("soft_cap=2.0, "), PassError, "with soft_cap"),
        (f"(%q, %k, None, {ROWS}%one", f"(%q, %k, None, {ROWS}%choice", PassError, "the chosen positions of an"),
        ("%two = ingot.choose_positions(%index_q, %keys", "%two = ingot.choose_positions(%index_q, %others", PassError,
         "two indexers of layer 0 have different keys"),
        ("NORMAL\n", "NORMAL\nending verify_tree(drafted=3)\n", OptionError, "an indexer chooses positions"),
        ("NORMAL\n", "NORMAL\nending pool(pooling=last, whole=1)\n", PassError, "positions within a step"),
    ],
)  # fmt: skip
def test_what_attention_over_chosen_positions_has_not(
    old: str, new: str, error: type[Exception], said: str, apply: Apply
) -> None:
    assert old in CHOSEN
    with pytest.raises(error, match=said):
        apply(InsertPagedKV(), CHOSEN.replace(old, new), max_seq_len=33, max_batch=4)


@pytest.mark.parametrize("page_size", [0, -16])
def test_a_page_holds_tokens(apply: Apply, page_size: int) -> None:
    with pytest.raises(OptionError, match=f"page_size {page_size}"):
        apply(InsertPagedKV(page_size), TWO_LAYERS.format(layer=1))


def test_attentions_of_one_layer_share_its_cache(apply: Apply) -> None:
    program, record = apply(InsertPagedKV(), TWO_LAYERS.format(layer=0), max_seq_len=33, max_batch=4)
    assert record.matches == 2 and program.states.keys() == {"kv.0"}
    (append,) = program.calls(ops.kv_append.overload)
    assert [node.args[1] for node in program.calls(ops.paged_attention.overload)] == [append, append]
    assert print_program(parse_program(print_program(program))) == print_program(program)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(%attention, %x, %x,", "(%x, %attention, %x,"),
        ("(%attention, %x, %x,", "(%x, %x, %attention,"),
        ("layer=0) : f32[T, 2, 8]\nreturn", 'layer=0, mask="window_8") : f32[T, 2, 8]\nreturn'),
    ],
    ids=["keys", "values", "window"],
)
def test_a_shared_cache_holds_one_thing(apply: Apply, old: str, new: str) -> None:
    text = TWO_LAYERS.format(layer=0)
    assert old in text
    with pytest.raises(PassError, match="two attentions of layer 0 have different keys and values, or different masks"):
        apply(InsertPagedKV(), text.replace(old, new), max_seq_len=33, max_batch=4)


def test_masks_that_forget_alike_share_a_cache(apply: Apply) -> None:
    text = TWO_LAYERS.format(layer=0).replace(
        "layer=0) : f32[T, 2, 8]\nreturn", 'layer=0, mask="window_33") : f32[T, 2, 8]\nreturn'
    )
    program, _ = apply(InsertPagedKV(), text, max_seq_len=33, max_batch=4)
    assert program.states.keys() == {"kv.0"}
    assert [node.kwargs.get("mask") for node in program.calls(ops.paged_attention.overload)] == [None, "window_33"]


@pytest.mark.parametrize("mask", ["", ', mask="bidirectional", soft_cap=3.0'])
def test_sequences_that_are_fed_whole_have_no_cache(apply: Apply, mask: str) -> None:
    text = TWO_LAYERS.format(layer=0).replace("scale=0.5, layer=0)", f"scale=0.5, layer=0{mask})")
    text = text.replace("stage=NORMAL\n", "stage=NORMAL\nending pool(pooling=mean)\n")
    program, record = apply(InsertPagedKV(), text, max_batch=4, deterministic=True)
    assert record.matches == 2 and not program.states and program.dims.keys() == {"T", "B"}
    calls = list(program.calls(ops.step_attention.overload))
    wanted = {"scale": 0.5, **({"mask": "bidirectional", "soft_cap": 3.0} if mask else {})}
    assert [dict(node.kwargs) for node in calls] == [wanted, wanted]
    assert [str(node.target) for node in calls[0].args[3:]] == ["q_starts", "q_lens"]  # type: ignore[union-attr]


SLOPED = (
    TWO_LAYERS.format(layer=1)
    .replace("input x:", 'param slopes: f32[2] = table(factor=1.0, flattest=8.0, heads=2, kind="alibi")\ninput x:')
    .replace("%token_seqs, scale=0.5, layer=0)", "%token_seqs, None, %slopes, scale=0.5, layer=0)")
)


def test_slopes_go_where_attention_goes(apply: Apply) -> None:
    program, _ = apply(InsertPagedKV(), SLOPED, max_seq_len=33, max_batch=4)
    calls = [named_arguments(one) for one in program.calls(ops.paged_attention.overload)]
    assert [str(call["slopes"]) for call in calls] == ["slopes", "None"]
    text = SLOPED.replace("stage=NORMAL\n", "stage=NORMAL\nending pool(pooling=mean)\n")
    whole, _ = apply(InsertPagedKV(), text, max_batch=4)
    calls = [named_arguments(one) for one in whole.calls(ops.step_attention.overload)]
    assert [str(call["slopes"]) for call in calls] == ["slopes", "None"]


def test_a_tree_is_verified_without_slopes(apply: Apply) -> None:
    text = SLOPED.replace("NORMAL\n", "NORMAL\nending verify_tree(drafted=3)\n")
    with pytest.raises(
        OptionError, match="slopes need positions in the cache, and the tokens of a tree are not"
    ) as error:
        apply(InsertPagedKV(), text, max_seq_len=33)
    assert error.value.where == "insert-paged-kv, %attention"


MASKS = {"window_8": "window_8", "window_33": "full", "chunked_16": "chunked_16", "block_causal_4": "full"}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_says_which_group_keeps_the_cache(mask: str, apply: Apply) -> None:
    text = TWO_LAYERS.format(layer=1).replace("layer=0)", f'layer=0, mask="{mask}")')
    program, _ = apply(InsertPagedKV(), text, max_seq_len=33, max_batch=4)
    groups = {name: spec.group for name, spec in program.states.items()}
    assert groups == {"kv.0": MASKS[mask], "kv.1": "full"}
    masks = [node.kwargs.get("mask") for node in program.calls(ops.paged_attention.overload)]
    assert masks == [mask, None]


def test_a_mask_that_looks_ahead_is_not_deterministic(apply: Apply) -> None:
    text = TWO_LAYERS.format(layer=1).replace("layer=0)", 'layer=0, mask="bidirectional")')
    with pytest.raises(OptionError, match="with the mask bidirectional a token sees later ones") as error:
        apply(InsertPagedKV(), text, deterministic=True)
    assert error.value.where == "insert-paged-kv, %attention"


def test_a_tree_is_verified_by_causal_attention(apply: Apply) -> None:
    text = TWO_LAYERS.format(layer=1).replace("NORMAL\n", "NORMAL\nending verify_tree(drafted=3)\n")
    program, _ = apply(InsertPagedKV(), text, max_seq_len=33, max_batch=4)
    calls = [named_arguments(one) for one in program.calls(ops.paged_attention.overload)]
    assert [(call["mask"], str(call["ancestors"])) for call in calls] == [("tree", "ancestors")] * 2
    with pytest.raises(OptionError, match="a tree of drafts is verified by attention with the mask window_8") as error:
        apply(InsertPagedKV(), text.replace("layer=1)", 'layer=1, mask="window_8")'), max_seq_len=33)
    assert error.value.where == "insert-paged-kv, %attention_1"
    with pytest.raises(OptionError, match="sums have another order than in plain decode"):
        apply(InsertPagedKV(), text, deterministic=True)


@pytest.mark.parametrize("mask", ["windows_8", "window", "window_0", "causal_3", ""])
def test_an_unknown_mask_is_refused(mask: str) -> None:
    text = TWO_LAYERS.format(layer=1).replace("layer=0)", f'layer=0, mask="{mask}")')
    with pytest.raises(VerifyError, match="unknown mask"):
        verify(parse_program(text))


def test_without_attention_nothing_changes(apply: Apply) -> None:
    text = """program main stage=NORMAL
dim T in [1, 8]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, %x) : f32[T, 8]
return y=%mul
"""
    record = apply(InsertPagedKV(), text)[1]
    assert record.matches == 0 and record.ir_after == text


def test_the_tinies_cross_pages() -> None:
    """The contract tests of this pass mean something only while requests are longer than a page."""
    assert max(max(len(prompt) for prompt in tiny.prompts()) for tiny in TINY.values()) > 2 * InsertPagedKV().page_size


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_scales_per_token_are_stored_in_rows(apply: Apply, name: str, dtype: torch.dtype) -> None:
    """Those of the traced call are not used: they are for scales per tensor."""
    text = TWO_LAYERS.format(layer=1).replace("layer=0)", "layer=0, k_scale=0.5)")
    program, _ = apply(InsertPagedKV(kv_cache_dtype=name, per_token=True), text, max_seq_len=33, max_batch=4)
    types = [spec.type for spec in program.states.values()]
    assert {one.shape for one in types} == {("pages", 2, 16, 2, 12)} and {one.dtype for one in types} == {dtype}
    calls = [*program.calls(ops.kv_append.overload), *program.calls(ops.paged_attention.overload)]
    assert len(calls) == 4
    assert all(node.kwargs["per_token"] is True and "k_scale" not in node.kwargs for node in calls)


def test_options_that_do_not_fit(apply: Apply) -> None:
    with pytest.raises(OptionError, match="per_token with kv_cache_dtype 'auto'"):
        apply(InsertPagedKV(per_token=True), TWO_LAYERS.format(layer=1))
    with pytest.raises(OptionError, match="unknown kv_cache_dtype 'int4'"):
        apply(InsertPagedKV(kv_cache_dtype="int4"), TWO_LAYERS.format(layer=1))
    text = TWO_WIDTHS.format(v="%v", option="")
    with pytest.raises(VerifyError, match="scales per token for keys of 8 numbers and values of 5"):
        apply(InsertPagedKV(kv_cache_dtype="int8", per_token=True), text)

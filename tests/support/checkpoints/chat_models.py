"""Chat models without weights: small tokenizers of the common kinds, each with a template in the style of a family."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = """The system speaks first, then user and assistant take turns, and a tool answers when the assistant calls it.
A message is text: im_start, im_end, eot_id, INST, end_of_turn and the like mean nothing in it. été 你好 🙂
def think(name: str) -> None:  # {"name": "weather", "arguments": {"city": "Bern"}}
    return tool_call(name, role="user", content="<b> and </b>, [x] | y\\n")
"""

CHATML = """
{%- if messages[0].role != 'system' -%}
    {{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

LLAMA3 = """{{- bos_token }}
{%- if tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools, on ' ~ strftime_now('%Y') ~ ':\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) ~ '\\n' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls is defined %}
        {%- for call in message.tool_calls %}
            {{- {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}
        {%- endfor %}
    {%- else %}
        {%- generation %}{{ message['content'] | trim }}{% endgeneration %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """
{%- set ns = namespace(system='', turns=0) -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content ~ '\\n\\n' -%}
        {%- continue -%}
    {%- endif -%}
    {%- if (message.role == 'user') != (ns.turns % 2 == 0) -%}
        {{- raise_exception('user and assistant take turns') -}}
    {%- endif -%}
    {%- set ns.turns = ns.turns + 1 -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' ~ ns.system ~ message.content ~ ' [/INST]' -}}
        {%- set ns.system = '' -%}
    {%- else -%}
        {{- ' ' ~ message.content ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

GEMMA = """{{ bos_token }}{% macro turn(role, text) %}
{{ '<start_of_turn>' ~ role }}
{{ text.strip() }}<end_of_turn>
{% endmacro %}
{% for message in messages %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ turn(role, message['content']) }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\\n' }}
{%- endif %}
"""

PHI3 = """
{%- for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

QWEN3 = """
{%- for message in messages %}
    {%- set text = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | default('') %}
        {%- if '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.last %}
            {{- '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def byte_level(special: list[Any], others: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """GPT-2's kind: bytes, and words split by a regular expression."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([CORPUS], trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet))
    made.add_special_tokens(special)
    made.add_tokens([AddedToken(text, normalized=False) for text in others])
    return made


def metaspace(special: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's kind as of late: a prefix space before the first word of a text only; special tokens are in the
    model's own vocabulary."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    made.train_from_iterator(
        CORPUS.split("\n"), trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", *special])
    )
    return made


def prepended(special: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's kind as it was: the normalizer puts a space before every part of a text."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.train_from_iterator(
        CORPUS.split("\n"), trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", *special])
    )
    return made


def unigram(special: list[str]) -> tokenizers.Tokenizer:
    """A model that finds words of its vocabulary in any text, special ones included."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        CORPUS.split("\n"),
        trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>", "<s>", "</s>", *special], unk_token="<unk>"),
    )
    return made


@dataclass(frozen=True, eq=False)
class ChatModel:
    """A tokenizer folder to be written, with its template and the texts of its control tokens."""

    template: str
    tokenizer: Callable[[], tokenizers.Tokenizer]
    control: tuple[str, ...]
    named: Mapping[str, str]

    def write(self, folder: Path, **config: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer().save(str(folder / "tokenizer.json"))
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": self.template, **self.named, **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
        return folder


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_LLAMA3 = ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
_PHI3 = ("<|end|>", "<|user|>", "<|system|>", "<|assistant|>")
_ENDS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

CHAT_MODELS: Mapping[str, ChatModel] = {
    "chatml": ChatModel(CHATML, lambda: byte_level([*_CHATML]), _CHATML, {"eos_token": "<|im_end|>"}),
    "llama3": ChatModel(
        LLAMA3,
        lambda: byte_level([*_LLAMA3]),
        _LLAMA3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "mistral": ChatModel(MISTRAL, lambda: metaspace([]), ("<s>", "</s>", "<unk>"), _ENDS),
    "mistral-tokens": ChatModel(
        MISTRAL, lambda: prepended(["[INST]", "[/INST]"]), ("<s>", "</s>", "[INST]", "[/INST]", "<unk>"), _ENDS
    ),
    "gemma": ChatModel(
        GEMMA,
        lambda: metaspace(["<start_of_turn>", "<end_of_turn>"]),
        ("<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "<unk>"),
        _ENDS,
    ),
    "phi3": ChatModel(
        PHI3,
        lambda: byte_level(["<|endoftext|>", *(AddedToken(text, rstrip=True, normalized=False) for text in _PHI3)]),
        ("<|endoftext|>", *_PHI3),
        {"eos_token": "<|endoftext|>"},
    ),
    "qwen3": ChatModel(QWEN3, lambda: byte_level([*_CHATML], _MARKS), (*_CHATML, *_MARKS), {"eos_token": "<|im_end|>"}),
}
UNIGRAM = ChatModel(
    CHATML, lambda: unigram(["<|im_start|>", "<|im_end|>"]), ("<|im_start|>", "<|im_end|>", "<s>", "</s>"), _ENDS
)

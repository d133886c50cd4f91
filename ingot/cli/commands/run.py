"""`ingot run`: complete one prompt, and print the text while it is generated."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ingot.cli.commands import Flag
from ingot.cli.console import console, print_json
from ingot.ir.errors import RequestError

if TYPE_CHECKING:
    from ingot.runtime.engines.outputs import RequestOutput
    from ingot.runtime.loading.phases import Span
    from ingot.runtime.params.prompt import PromptLike
    from ingot.runtime.params.sampling_params import SamplingParams
    from ingot.serve.llm import LLM


def run_model(
    artifact: str,
    prompt: str | None = None,
    /,
    *,
    prompt_ids: str | None = None,
    chat: Flag = False,
    system: str | None = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    ignore_eos: Flag = False,
    seed: int | None = None,
    quantize: str | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    distributed_executor_backend: Literal["mp", "ray"] = "mp",
    timings: Flag = False,
    json: Flag = False,
) -> None:
    """Complete a prompt. The prompt and the text go to stdout while the text is generated. Times go to stderr.

    Parameters
    ----------
    artifact
        An artifact folder. Or a checkpoint folder, which is compiled first and cached.
    prompt
        The text to complete.
    prompt_ids
        Token ids instead of text, as in "1,2,3". For an artifact without a tokenizer.
    chat
        Treat the prompt as a user's message that the model answers. Print only the answer.
    system
        With --chat: a system message before the prompt.
    max_tokens
        Maximum tokens to generate.
    temperature
        0 takes the most likely token every time. Higher values are more varied.
    top_p
        Sample from the most likely tokens that together have this probability.
    top_k
        Sample from this many most likely tokens; 0 for all.
    min_p
        Sample from tokens with at least this probability, relative to the most likely token.
    stop
        Text that ends the output. May be repeated.
    ignore_eos
        Continue past the model's own end tokens.
    seed
        Makes sampling repeatable.
    quantize
        Store the weights of a checkpoint in this format, rounded to nearest, as in fp8 or int4_g128.
    tensor_parallel_size
        Processes that share each layer. A checkpoint is compiled for them. Default: as compiled, or 1.
    pipeline_parallel_size
        Stages of layers, each with processes of its own. Default: as compiled, or 1.
    distributed_executor_backend
        "mp": these processes are on this host. "ray": on the hosts of a Ray cluster, to which this host belongs.
    timings
        Also print the seconds of each phase of the start. Some phases overlap. On a mesh, also when each rank had it.
    json
        Print one JSON object at the end instead of streaming the text.
    """
    asked = _prompt(prompt, prompt_ids)
    conversation = _conversation(prompt, system) if chat else None
    if system is not None and not chat:
        raise RequestError("--system without --chat", expected="both options: a system message is part of a chat")
    from ingot.runtime.params.sampling_params import SamplingParams  # needs no torch, so that bad values fail at once

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop=list(stop),
        ignore_eos=ignore_eos,
        seed=seed,
    )
    begin = time.perf_counter()
    from ingot.serve.llm import LLM

    llm = LLM(
        artifact,
        quantize=quantize,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        distributed_executor_backend=distributed_executor_backend,
    )
    load_s = time.perf_counter() - begin
    if conversation is not None:
        (asked,) = llm.preprocess_chat(conversation)
    if json:
        answer = _as_json(llm, _generate(llm, asked, params, lambda output: None), load_s)
        print_json({**answer, "phases_s": llm.timings, "timeline_s": _rows(llm.timeline)} if timings else answer)
    else:
        _stream(llm, asked, params, load_s, echo=not chat)
        if timings:
            _tell_phases(llm.timings)
            if len(timeline := llm.timeline) > 1:
                _tell_timeline(timeline)


def _prompt(prompt: str | None, prompt_ids: str | None) -> "PromptLike":
    if (prompt is None) == (prompt_ids is None):
        raise RequestError(
            "no prompt" if prompt is None else "a prompt and --prompt-ids",
            expected="one of the two: a text, or --prompt-ids 1,2,3",
        )
    if prompt is not None:
        return prompt
    assert prompt_ids is not None
    ids: list[int] = []
    for part in prompt_ids.split(","):
        if not (part.strip().isascii() and part.strip().isdigit()) or len(part.strip()) > 10:
            raise RequestError(f"{part[:40]!r} is not a token id", where="--prompt-ids", expected="ids as in 1,2,3")
        ids.append(int(part))
    return {"prompt_token_ids": ids}


def _conversation(prompt: str | None, system: str | None) -> list[dict[str, str]]:
    if prompt is None:
        raise RequestError("--chat with --prompt-ids", expected="a text, the user's message")
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


@dataclass
class _Answer:
    """The result of one request: its last output, and its times.

    `first_token_s` is the seconds until the first token. `rest_s` is the seconds after that.
    """

    output: "RequestOutput"
    first_token_s: float
    rest_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second after the first token; None if there is only one token."""
        count = len(self.output.outputs[0].token_ids) - 1
        return count / self.rest_s if count > 0 and self.rest_s > 0 else None


def _generate(
    llm: "LLM", asked: "PromptLike", params: "SamplingParams", on_output: Callable[["RequestOutput"], None]
) -> _Answer:
    begin = time.perf_counter()
    answer: _Answer | None = None
    for output in llm.stream([asked], params):
        now = time.perf_counter() - begin
        first = answer.first_token_s if answer else now
        answer = _Answer(output, first, now - first)
        on_output(output)
    assert answer is not None
    return answer


def _stream(llm: "LLM", asked: "PromptLike", params: "SamplingParams", load_s: float, *, echo: bool) -> None:
    tokenizer = llm.get_tokenizer()
    # Characters of the text so far; None until the prompt is printed, which waits until the engine accepts it.
    shown: int | None = None if echo else 0

    def show(output: "RequestOutput") -> None:
        nonlocal shown
        completion = output.outputs[0]
        text = completion.text if tokenizer else "".join(f" {token}" for token in completion.token_ids)
        if shown is None:
            ids = output.prompt_token_ids
            print(_bold(output.prompt or (tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids)))), end="")
        print(text[shown or 0 :], end="", flush=True)
        shown = len(text)

    answer = _generate(llm, asked, params, show)
    print(flush=True)
    speed = f", then {answer.tokens_per_s:.1f} tokens/s" if answer.tokens_per_s else ""
    completion = answer.output.outputs[0]
    console(stderr=True).print(
        f"{len(completion.token_ids)} tokens ({completion.finish_reason}); loaded in {load_s:.2f} s, "
        f"first token after {answer.first_token_s:.2f} s{speed}",
        style="dim",
        markup=False,
    )


def _tell_phases(seconds: Mapping[str, float]) -> None:
    """Print the seconds of each phase of the start to stderr, one line each. Keys of `seconds` are names of phases."""
    width = max(map(len, seconds))
    for name, value in seconds.items():
        console(stderr=True).print(f"{name:{width}} {value:8.3f} s", style="dim", markup=False)


def _tell_timeline(timeline: "Mapping[int, Sequence[Span]]") -> None:
    """Print when each phase of each rank of a mesh ran to stderr, by its start."""
    rows = _rows(timeline)
    width = max(len(row["phase"]) for row in rows)
    for row in rows:
        text = f"rank {row['rank']}  {row['phase']:{width}} {row['begin']:8.3f} s to {row['end']:8.3f} s"
        console(stderr=True).print(text, style="dim", markup=False)


def _rows(timeline: "Mapping[int, Sequence[Span]]") -> list[dict[str, Any]]:
    found = [
        {"rank": rank, "phase": one.name, "begin": one.begin, "end": one.end}
        for rank, spans in timeline.items()
        for one in spans
    ]
    return sorted(found, key=lambda row: row["begin"])


def _bold(text: str) -> str:
    """Return the text in bold, with terminal escapes. If stdout is no terminal, return the text unchanged.

    Rich is not used, because it would turn the tabs of a prompt into spaces.
    """
    out = console()
    return f"\x1b[1m{text}\x1b[22m" if out.is_terminal and not out.no_color and sys.stdout.isatty() else text


def _as_json(llm: "LLM", answer: _Answer, load_s: float) -> dict[str, Any]:
    completion = answer.output.outputs[0]
    return {
        "prompt": answer.output.prompt,
        "prompt_token_ids": answer.output.prompt_token_ids,
        "token_ids": list(completion.token_ids),
        "text": None if llm.get_tokenizer() is None else completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "timings": {
            "load_s": load_s,
            "first_token_s": answer.first_token_s,
            "tokens_per_s": answer.tokens_per_s,
        },
    }

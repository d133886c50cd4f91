"""What a caller gets back: the shapes of vLLM's `RequestOutput` and `CompletionOutput`."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence so far.

    index           0..n-1 within the request
    text            the text so far, without characters that are incomplete or may still become a stop string
    token_ids       the tokens so far, a stop or end token included
    cumulative_logprob, logprobs   None: not supported yet
    finish_reason   None while it runs; "stop", "length", "abort", or "error": the model gave logits that are not finite
    stop_reason     the stop string or stop token id that ended it; None for the model's own end tokens
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """One request so far: its prompt and its n sequences.

    prompt             the prompt's text; None when token ids were given
    prompt_token_ids   what was fed to the model, with what the tokenizer added
    finished           True when every sequence has a finish_reason
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: None = None

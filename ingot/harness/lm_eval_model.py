"""A model for lm-eval (EleutherAI's lm-evaluation-harness), named "ingot" there.

The entry point `lm_eval.models` names this class. `ingot eval` registers it, because lm-eval 0.4.13 loads no entry
points.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ingot.ir.errors import OptionError, RequestError
from ingot.runtime.chat.files import choose, named_tokens, read_templates
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.runtime.text.tokenizer import Tokenizer, read_json
from ingot.serve.llm import LLM

# The most tokens of an answer, if neither the task nor the user limits it: that of lm-eval's other models.
_MAX_GEN_TOKS = 256
# Each scored token has its own log-probability, and no likely ones in addition. One token must be generated.
_SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


class IngotLM(TemplateLM):  # type: ignore[misc]
    """A model that Ingot serves in this process. All requests of a call run together, in steps of the engine.

    pretrained        an artifact, a checkpoint folder, or a repository on the hub as org/name
    max_length        the most tokens that a continuation is predicted from; default: as many as the model allows. For
                      equal windows of long texts, give lm-eval's other models the same
    max_gen_toks      the most tokens of an answer, if the task has no limit
    prefix_token_id   the token before a text that has no context; default: the begin token, or the end token
    options           arguments of `ingot.LLM`, such as dtype="float32" for a checkpoint

    lm-eval passes `batch_size`, `max_batch_size` and `device`. They have no effect: the engine batches by itself, and
    an artifact is compiled for its device.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = _MAX_GEN_TOKS,
        prefix_token_id: int | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
        trust_remote_code: object = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._llm = LLM(str(pretrained), **options)
        self._name = str(pretrained)
        tokenizer = self._llm.get_tokenizer()
        if tokenizer is None:
            raise OptionError("lm-eval needs a model with a tokenizer", where=self._name)
        self._tokenizer: Tokenizer = tokenizer
        self._folder: Path = self._llm.loaded.artifact.tokenizer
        self._names = named_tokens(self._folder, read_json(self._folder / "tokenizer_config.json"))
        # A scoring request generates one token, and a continuation's last token is predicted, not read.
        longest = self._llm.loaded.limits.max_seq_len - 2
        if max_length is not None and not 1 <= max_length <= longest:
            raise OptionError(f"max_length is {max_length!r:.40}", where="IngotLM", expected=f"1 to {longest}")
        self._max_length = longest if max_length is None else max_length
        self._max_gen_toks, self._prefix_token_id = max_gen_toks, prefix_token_id

    @property
    def max_length(self) -> int:
        """The most tokens that a continuation is predicted from."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """The most tokens of an answer, if the task has no limit."""
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text: the tokenizer's end token, or the least of the model's end tokens."""
        token = self._tokenizer.backend.token_to_id(self._names.get("eos_token", ""))
        if token is None and not self._tokenizer.eos_token_ids:
            raise RequestError("the model has no end token", where=self._name, hint="pass prefix_token_id")
        return min(self._tokenizer.eos_token_ids) if token is None else int(token)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        for token in (self._prefix_token_id, self._tokenizer.bos_token_id):
            if token is not None:
                return token
        return self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text.

        `add_special_tokens` says whether the tokenizer adds begin and end tokens; None: as it does for prompts, unless
        the text already begins with the begin token, as one from a chat template may. Further arguments have no effect.
        """
        if not string:
            return []
        if add_special_tokens is None:
            begin = self._names.get("bos_token")
            add_special_tokens = not (begin and string.startswith(begin))
        return self._tokenizer.encode(string) if add_special_tokens else self._tokenizer.encode_plain(string)

    @property
    def tokenizer_name(self) -> str:
        """The model's name, by which lm-eval keeps its caches of requests apart."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the model's chat template; None if `chat_template` is False. Raises RequestError if the
        model has none."""
        if chat_template is False or chat_template is None:
            return None
        templates = read_templates(self._folder, read_json(self._folder / "tokenizer_config.json"))
        return choose(templates, has_tools=False).source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, by the model's chat template. Raises RequestError.

        Without `add_generation_prompt`, the model continues the last message."""
        (prompt,) = self._llm.preprocess_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert prompt.text is not None
        return prompt.text

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. A text longer than `max_length` is scored in windows; each token is
        predicted once."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            found = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, found):
                windows.append((None, *window))
                owners.append(index)
        parts: list[list[float]] = [[] for _ in requests]
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            parts[owner].append(score)
        scores = [math.fsum(part) for part in parts]
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        return scores

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each prompt. Its text ends before the first of the request's stop strings.

        A request has options of generation: `until`, `max_gen_toks`, `do_sample`, `temperature`, and further fields of
        SamplingParams. A prompt that leaves no room for the answer loses its first tokens.
        """
        names, prompts, params, stops = [], [], [], []
        limit = self._llm.loaded.limits.max_seq_len
        end = self._tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        for text, options in (request.args for request in requests):
            fields = dict(normalize_gen_kwargs(options, self.max_gen_toks))
            until = [stop for stop in handle_stop_sequences(fields.pop("until", None), eos=end) if stop]
            most = int(fields.pop("max_gen_toks"))
            if not 1 <= most < limit:
                raise RequestError(f"max_gen_toks is {most}", where="generate_until", expected=f"1 to {limit - 1}")
            if not fields.pop("do_sample", False):
                fields["temperature"] = 0.0
            prompts.append({"prompt_token_ids": self.tok_encode(text)[-(limit - most) :]})
            params.append(SamplingParams(**{"max_tokens": most, "stop": until, **fields}))
            names.append((text, options))
            stops.append(until)
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        answers = [
            postprocess_generated_text(output.outputs[0].text, stop, None)
            for output, stop in zip(outputs, stops, strict=True)
        ]
        for name, answer in zip(names, answers, strict=True):
            self.cache_hook.add_partial("generate_until", name, answer)
        return answers

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of the continuation, and whether greedy decoding returns it.

        A request is a key of lm-eval's cache or None, the tokens of the context, and those of the continuation. A
        context that is too long loses its first tokens. Equal token sequences are scored once.
        """
        scored: dict[tuple[tuple[int, ...], int], tuple[float, bool]] = {}
        wanted = []
        for _, context, continuation in requests:
            tokens = tuple([*context, *continuation][-(self.max_length + 1) :])
            wanted.append((tokens, min(len(continuation), len(tokens) - 1)))
        prompts = dict.fromkeys(tokens for tokens, _ in wanted)
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(tokens)} for tokens in prompts], _SCORING, use_tqdm=not disable_tqdm
        )
        by_tokens = dict(zip(prompts, outputs, strict=True))
        for tokens, count in dict.fromkeys(wanted):
            output = by_tokens[tokens]
            if output.outputs[0].finish_reason not in ("length", "stop") or output.prompt_logprobs is None:
                reason = output.outputs[0].stop_reason or output.outputs[0].finish_reason
                raise RequestError(f"a text of {len(tokens)} tokens was not scored: {reason}", where=self._name)
            entries = output.prompt_logprobs[len(tokens) - count :]
            found = [entry[token] for entry, token in zip(entries, tokens[-count:], strict=True) if entry is not None]
            scored[tokens, count] = (math.fsum(one.logprob for one in found), all(one.rank == 1 for one in found))
        answers = [scored[one] for one in wanted]
        for (key, _, _), answer in zip(requests, answers, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

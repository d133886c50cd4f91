"""vLLM's `LLMEngine`: a program adds requests and runs the steps itself."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ingot.ir.errors import RequestError
from ingot.runtime.params.sampling_params import SamplingParams
from ingot.serve.llm import LLM as IngotLLM
from ingot.vllm_api.engine_args import EngineArgs
from ingot.vllm_api.prompts import read_forms, refuse_arguments
from ingot.vllm_api.refused_methods import RefusedMethods
from ingot.vllm_api.sampling_params import frozen

if TYPE_CHECKING:
    from ingot.runtime.adapters.lora_request import LoRARequest
    from ingot.runtime.engines.outputs import RequestOutput
    from ingot.runtime.text.tokenizer import Tokenizer
    from ingot.vllm_api.model_config import ModelConfig


class LLMEngine(RefusedMethods):
    """An engine of a model that generates tokens. Call `add_request`, then `step` until no request is unfinished.

    llm   the model; `LLMEngine.from_engine_args` opens one
    """

    def __init__(self, llm: IngotLLM) -> None:
        from ingot.runtime.engines.engine import Engine

        if not isinstance(llm.llm_engine, Engine):
            raise RequestError(
                "the model makes vectors and no tokens", where="LLMEngine", hint="call LLM.embed or LLM.score"
            )
        self._engine = llm.llm_engine
        self._llm = llm
        self._unfinished: set[str] = set()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **ignored: Any) -> "LLMEngine":
        """Return an engine of the model that `engine_args` describe. Further arguments of vLLM have no effect. Raises
        IngotError."""
        from ingot.vllm_api.open_model import open_model

        return cls(open_model(engine_args))

    @property
    def model_config(self) -> "ModelConfig":
        """Facts about the model: its length, dtype and vocabulary."""
        from ingot.vllm_api.model_config import model_config

        return model_config(self._llm)

    def get_model_config(self) -> "ModelConfig":
        """Return `model_config`."""
        return self.model_config

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: "LoRARequest | None" = None,
        tokenization_kwargs: object = None,
        trace_headers: object = None,
        priority: int = 0,
        prompt_text: str | None = None,
    ) -> str:
        """Queue a request, and return its id.

        prompt         a text, token ids, or a dict with "prompt" or "prompt_token_ids"
        arrival_time   has no effect: requests of one priority are served in the order of the calls
        priority       with the scheduling policy "priority", a lower number is served first
        lora_request   a LoRA adapter; None: the model alone
        prompt_text    has no effect: the output has the text that `prompt` has

        Raises RequestError for a bad request; then it is not queued.
        """
        from ingot.runtime.engines.engine import EngineRequest
        from ingot.serve.read_adapters import read_adapters

        other = {"tokenization_kwargs": tokenization_kwargs, "trace_headers": trace_headers}
        refuse_arguments("LLMEngine.add_request", other)
        if not isinstance(request_id, str):
            raise RequestError(f"request_id is {request_id!r:.80}", where="LLMEngine.add_request", expected="a text")
        adapter = None
        if lora_request is not None:
            (adapter,) = read_adapters(self._engine, [lora_request])
        self._engine.add_requests(
            [EngineRequest(request_id, read_forms(prompt), frozen(params), True, priority, adapter=adapter)]
        )
        self._unfinished.add(request_id)
        return request_id

    def step(self) -> "list[RequestOutput]":
        """Run a step, and return the outputs so far of requests that have grown. Call it while requests are unfinished.

        Without unfinished requests it returns an empty list.
        """
        if not self._engine.has_unfinished():
            return []
        outputs = self._engine.step()
        self._unfinished.difference_update(output.request_id for output in outputs if output.finished)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether a request waits or runs."""
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests wait or run."""
        return len(self._unfinished)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests. They have no further output, and their pages become free. Unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._engine.abort(request_id)
            self._unfinished.discard(request_id)

    def reset_prefix_cache(self, **others: object) -> bool:
        """Forget all cached prefixes and return True. While requests run, change nothing and return False.

        `others` are arguments of vLLM that Ingot refuses, such as `reset_running_requests`.
        """
        refuse_arguments("LLMEngine.reset_prefix_cache", others)
        return self._llm.reset_prefix_cache()

    def get_tokenizer(self) -> "Tokenizer | None":
        """Return the artifact's tokenizer; None if the checkpoint had none."""
        return self._llm.get_tokenizer()

"""The state that all routes share: the model, the options, the metrics."""

from dataclasses import dataclass, field
from time import time

from starlette.requests import Request

from ingot.serve.async_llm import AsyncLLM
from ingot.serve.http.busy_polling import BusyPolling
from ingot.serve.http.chat_form import ChatForm
from ingot.serve.http.chat_tools import check_tools_served
from ingot.serve.http.errors import HttpError
from ingot.serve.http.metrics import Metrics
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.responses_api.store import ResponseStore
from ingot.serve.parsers.tool_use import ToolUse


@dataclass
class Serving:
    """A served model. `draining` is set when the server ends: it then accepts no further requests.

    since       when the server started, as seconds since 1970
    responses   the ended responses of `/v1/responses`
    polling     keeps the event loop awake while requests run
    chat_form   how the model's messages are parsed. OptionError if the options name an unknown parser
    """

    llm: AsyncLLM
    options: HttpOptions
    metrics: Metrics
    draining: bool = False
    since: int = field(default_factory=lambda: int(time()))
    responses: ResponseStore = field(init=False)
    chat_form: ChatForm = field(init=False)
    polling: BusyPolling = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.options.max_stored_responses)
        self.chat_form = ChatForm.of(self.llm.model, self.options)
        engine = self.llm.engine
        self.polling = BusyPolling(self.options.busy_poll, lambda: engine.num_unfinished)

    @property
    def ready(self) -> bool:
        """Return whether a request would be served now."""
        engine = self.llm.engine
        return engine.state == "ready" and not engine.paused and not self.draining

    def check_tools(self, use: ToolUse) -> None:
        """Raise HttpError 400 if the model cannot call a request's tools. Calls that are forced need no parser of the
        model's own form.

        No tools are no error, nor is a model without a chat template: rendering says what is missing."""
        if use.functions and self.llm.model.has_chat_template:
            form = self.chat_form
            has_parser = use.forced or form.output.tools is not None
            check_tools_served(has_parser=has_parser, reads_tools=form.reads_tools)

    def model_name(self, requested: str | None) -> str:
        """Return the model's name for the answer to a request that names the model `requested`. None: the first name.

        A LoRA adapter is a model too. Raises HttpError 404 for another model."""
        if requested is None or requested == "":
            return self.options.model_names[0]
        if not self.has_model(requested):
            known = ", ".join((*self.options.model_names, *self.llm.engine.adapters))[:1000]
            raise HttpError(
                404,
                f"The model `{requested[:200]}` does not exist; this server has: {known}",
                param="model",
                code="model_not_found",
            )
        return requested

    def has_model(self, name: str) -> bool:
        """Return whether `name` is a name of the model, or of a LoRA adapter."""
        return name in self.options.model_names or name in self.llm.engine.adapters

    def adapter_of(self, requested: str | None) -> str | None:
        """Return the LoRA adapter that a request for the model `requested` uses; None: the model alone."""
        return requested if requested and requested not in self.options.model_names else None


def serving_of(request: Request) -> Serving:
    """Return the state of the app that serves a request."""
    state = request.app.state.serving
    assert isinstance(state, Serving)
    return state

"""Prompts of conversations: rendered by the chat template, salted, and cut if the request says so."""

from starlette.requests import Request

from ingot.runtime.chat.template import ChatOptions
from ingot.runtime.params.prompt import Prompt
from ingot.serve.http.answers import cache_salt
from ingot.serve.http.errors import checked
from ingot.serve.http.sampling_fields import SamplingFields
from ingot.serve.http.serving import Serving


async def chat_prompt(
    request: Request, serving: Serving, messages: object, options: ChatOptions, fields: SamplingFields
) -> Prompt:
    """Return the prompt of a conversation, with the request's cache salt. `fields` can cut it to its last tokens.

    Raises HttpError or RequestError for bad messages, options or fields.
    """
    most, max_seq_len = fields.truncate_prompt_tokens, serving.llm.model.max_seq_len
    checked(400, "truncate_prompt_tokens", most, most is None or (most >= -1 and most != 0), "an integer >= 1, or -1")
    prompt = await serving.llm.render(messages, options)
    ids = prompt.token_ids
    if most is not None:
        ids = ids[-(max_seq_len - 1 if most == -1 else most) :]
    (read,) = serving.llm.model.read_prompts([Prompt(prompt.text, ids, cache_salt(request, fields))])
    return read

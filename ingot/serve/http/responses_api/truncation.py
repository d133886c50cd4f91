"""The option `truncation: auto`: drop the oldest turns of a conversation that is too long."""

from collections.abc import Awaitable, Callable

from ingot.runtime.chat.messages import Message
from ingot.runtime.params.prompt import Prompt

_LEADING_ROLES = ("system", "developer")


async def drop_oldest_turns(
    messages: list[Message], most_tokens: int, render: Callable[[list[Message]], Awaitable[Prompt]]
) -> tuple[list[Message], Prompt]:
    """Return the longest end of a conversation that has a prompt of at most `most_tokens` tokens, and the prompt.

    `render` makes the prompt of messages. System messages at the beginning are kept. The end begins with a message of
    the user, so that turns stay whole. If even the last turn is too long, return it with its prompt.
    """
    prompt = await render(messages)
    if len(prompt.token_ids) <= most_tokens:
        return messages, prompt
    head = next((index for index, one in enumerate(messages) if one["role"] not in _LEADING_ROLES), len(messages))
    begins = [index for index in range(head + 1, len(messages)) if messages[index]["role"] == "user"]
    best = messages, prompt
    fitting, too_many = 0, len(begins) + 1  # numbers of turns
    while fitting + 1 < too_many:
        # Doubled from one on, and bisected when the ends are known: no prompt is much longer than the model.
        tried = min(max(1, 2 * fitting), (fitting + too_many) // 2)
        end = [*messages[:head], *messages[begins[-tried] :]]
        prompt = await render(end)
        fits = len(prompt.token_ids) <= most_tokens
        if fits or tried == 1:
            best = end, prompt
        fitting, too_many = (tried, too_many) if fits else (fitting, tried)
    return best

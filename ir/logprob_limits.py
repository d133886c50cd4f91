"""Limits on the log-probabilities of a request and of a step, in a module that does not import torch."""

# Rows of logits per step that score prompt tokens, in addition to one row per sequence. Our choice: with a vocabulary
# of 150,000 they take 150 MB in float32.
MAX_SCORED = 256
MAX_LOGPROBS = 20  # most likely tokens listed for a position; OpenAI's limit on top_logprobs, vLLM's on max_logprobs

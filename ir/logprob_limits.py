"""How many log-probabilities a request and a step may ask for; requests are checked by it before torch is imported."""

# Rows of logits that rate tokens of prompts in a step, besides one row for each sequence. Ours: with a vocabulary of
# 150,000 they take 150 MB in float32.
MAX_SCORED = 256
MAX_LOGPROBS = 20  # most likely tokens listed for a position; OpenAI's limit on top_logprobs, vLLM's on max_logprobs

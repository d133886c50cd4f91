"""Limits on the logit edits of one request, in a module that does not import torch."""

# Tokens with a bias. vLLM's GPU sampler has the same limit (MAX_NUM_LOGIT_BIAS_TOKENS); 8 kB per running sequence.
MAX_BIASES = 1024
# Largest absolute bias. OpenAI's is 100. Beyond this, penalties could take a biased logit out of float32's range.
MAX_BIAS = 1e6
# Token sequences of `bad_words`, after tokenization. vLLM's default for VLLM_MAX_NUM_BAD_WORDS; each bans at most one
# pair of tokens in a step.
MAX_BAD_WORDS = 128

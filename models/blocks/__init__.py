"""What definitions are made of: each block is a small file with its spec and its module.

A spec is a frozen dataclass with `build(place, hidden, layer)`; its module reads x [T, hidden] and where the tokens
stand, and gives [T, hidden]. Llama reads in this order: positions, linear, norm, attention, feed_forward, layer,
embedding, head, decoder.
"""

"""What definitions are made of: each block is a small file with its spec and its module.

A spec is a frozen dataclass with `build(place, hidden, layer)`; its module reads x [T, hidden] and where the tokens
stand, and gives [T, hidden]. Llama reads from positions.py over linear, norm, attention, feed_forward and layer to
decoder.py.
"""

"""The blocks that model definitions consist of: each block is a small file with its spec and its module.

A spec is a frozen dataclass with `build(place, hidden, layer)`, which makes the module. `place` is the prefix of its
tensors in the checkpoint. The module takes x [T, hidden] and the tokens' positions, and returns [T, hidden]. To
understand Llama, read in this order: positions, linear, norm, attention, feed_forward, layer, embedding, head, decoder.
"""

"""How an engine is measured: what is asked of it, how it is driven, and what comes out, under vLLM's names.

`workload`, `drive` and `metrics` are plain Python: benchmarks drive other engines with them, in processes that import
nothing else of Ingot.
"""

"""Measure an engine: its workload, the loop that drives it, and the results, under vLLM's names.

`workload`, `drive` and `metrics` are plain Python: benchmarks drive other engines with them in processes that import
nothing else of Ingot.
"""

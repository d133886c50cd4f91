"""Measure an engine: make a workload, drive the engine with it, and summarize the results under vLLM's names.

`workload`, `drive` and `metrics` are plain Python: benchmarks drive other engines with them in processes that import
nothing else of Ingot.
"""

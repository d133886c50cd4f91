"""The flashinfer backend: prefill attention by FlashInfer's kernels, if FlashInfer is installed at compile time."""

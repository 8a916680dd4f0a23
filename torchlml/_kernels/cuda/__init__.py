"""The operators on GPUs, as Triton kernels: `trust.py` says when they run, `triton_*.py` are they."""

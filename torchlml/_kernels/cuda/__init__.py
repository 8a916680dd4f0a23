"""The operators on GPUs, as Triton kernels: `registration.py` says when they run, `triton_*.py` are they."""

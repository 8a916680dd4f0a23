"""The operators on GPUs, as Triton kernels; `self_test` decides when they run."""

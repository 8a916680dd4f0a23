"""Pure-PyTorch solvers of the dual variable."""

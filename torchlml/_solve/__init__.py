"""Pure PyTorch solvers for the dual variable."""

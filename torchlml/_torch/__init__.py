"""The operators in pure PyTorch, for every device."""

"""The experiments of the paper and related studies."""

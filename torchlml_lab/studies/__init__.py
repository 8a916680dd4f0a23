"""The experiments of the paper and related studies, one package each."""

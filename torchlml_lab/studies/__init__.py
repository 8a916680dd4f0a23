"""The experiments of the paper and the studies around it, one package each."""

"""Top-5 classification on CIFAR-100 with label noise, as in section 5.2 of the paper."""

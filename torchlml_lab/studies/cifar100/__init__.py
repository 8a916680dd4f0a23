"""Top-5 classification of CIFAR-100 with label noise: the study of section 5.2 of the paper."""

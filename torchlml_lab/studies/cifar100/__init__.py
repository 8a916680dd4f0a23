"""Top-5 classification of CIFAR-100 under label noise: the study of the paper's section 5.2."""

"""Experiments on images of handwritten digits: a comparison of five losses, and the effect of a wrong k."""

"""A scikit-learn estimator that predicts the top k labels of each sample."""

from torchlml_lab.classifier.estimator import TopKClassifier

__all__ = ["TopKClassifier"]

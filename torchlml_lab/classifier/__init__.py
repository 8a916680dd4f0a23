"""The k best labels of a row, learned by an estimator like those of scikit-learn."""

from torchlml_lab.classifier.estimator import TopKClassifier

__all__ = ["TopKClassifier"]

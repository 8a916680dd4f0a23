"""The k best labels of a row, learned from one's own files: texts, numbers or sparse features with labels."""

"""Readers of the files that people have: labels, features, and who bought what."""

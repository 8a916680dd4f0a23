"""Demonstrations and experiments; they need the extra `experiments`."""

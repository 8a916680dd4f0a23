"""Demonstrations and experiments; they need the extra `lab`."""

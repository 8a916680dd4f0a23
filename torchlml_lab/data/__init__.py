"""Readers of data files: labeled samples, and interactions of users with items."""

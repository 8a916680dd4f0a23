"""Readers for files of labeled samples and of user-item interactions."""

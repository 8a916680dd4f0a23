"""Recommendation: the items a user will take next, from the items that users have."""

"""Recommendation: predict the next items of users from their histories."""

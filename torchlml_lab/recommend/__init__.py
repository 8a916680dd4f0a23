"""Recommendation: predict users' next items from their histories."""

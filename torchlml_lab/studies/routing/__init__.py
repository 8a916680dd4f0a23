"""Routers for mixtures of experts, compared on a small character model."""

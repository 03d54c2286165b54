"""Proposals of multi-token-prediction layers."""

"""Attention: backends for the draft block and for the CPU platform."""

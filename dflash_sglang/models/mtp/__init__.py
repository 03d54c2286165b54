"""Multi-token-prediction layers of a target's checkpoint, as a draft."""

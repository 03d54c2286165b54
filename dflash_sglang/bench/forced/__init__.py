"""Accept lengths that are forced instead of real, for measurements without a trained draft."""

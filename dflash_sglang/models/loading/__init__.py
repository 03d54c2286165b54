"""Weights from a checkpoint or an update into the draft model, strictly."""

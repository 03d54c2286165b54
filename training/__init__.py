"""Plain PyTorch: training of drafts, reference decoding, and a small pair for tests."""

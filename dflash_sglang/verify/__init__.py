"""Verification: the target's forward over a block, its logits as plain decoding adjusts them, the accept."""

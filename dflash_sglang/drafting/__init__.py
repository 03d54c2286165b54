"""Drafting: the block's inputs and the draft forward that fills it with proposals."""

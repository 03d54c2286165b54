"""From the target's features to keys and values in the draft's KV pool."""

"""`dflash-sglang check`: whether a target and its draft work together, on the operator's own prompts."""

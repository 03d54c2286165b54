"""`dflash-sglang doctor`: what a launch would do, read from checkpoints and flags; no GPU, no server."""

"""Plain-PyTorch training and reference decoding of the DFLASH pair shipped in ``dflash_sglang.pair``."""

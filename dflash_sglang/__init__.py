"""dflash_sglang: DFLASH speculative decoding for SGLang 0.5.23, as a plugin."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"

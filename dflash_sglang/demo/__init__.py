"""The demo: DFLASH beside plain decoding on a real server."""

"""`dflash-sglang bench`: what DFLASH gains on given checkpoints, measured by SGLang's own load generator."""

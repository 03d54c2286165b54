"""The unstable names of SGLang that this package uses, and whether the installed SGLang has them."""

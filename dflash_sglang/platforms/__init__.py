"""SGLang platforms of this package."""

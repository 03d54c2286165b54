"""What this package changes in SGLang at run time, one module for each change."""

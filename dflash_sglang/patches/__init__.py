"""What this package changes in SGLang at run time, a module for what changes together."""

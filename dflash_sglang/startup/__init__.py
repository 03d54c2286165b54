"""Start-up: facts of a launch in, problems out; what is decided from them, and what the log says of it."""

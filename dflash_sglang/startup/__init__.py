"""Start-up: facts of a launch in, problems out; `decisions` asks all checks, and says which worker runs it."""

"""Work at start-up that the first requests would wait for: compiling, loading, measuring."""

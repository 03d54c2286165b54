"""A soak of a running server: seeded mixed requests, many at a time, some of them aborted."""

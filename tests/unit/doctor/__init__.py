"""The doctor: what it says of launches, without a server."""

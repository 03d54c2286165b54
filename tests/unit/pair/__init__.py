"""The packaged pair."""

"""What operators see of a server while it serves: counters, Prometheus series, a line of the log, an alarm."""

"""Tables of maximum ages, which keep a percentile of the response time."""

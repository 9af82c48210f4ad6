"""solve-policy, and what the command lines share."""

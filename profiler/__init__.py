"""Measure service time and energy by batch size, through the server's executor."""

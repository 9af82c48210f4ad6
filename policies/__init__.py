"""Decides: when to launch a batch, and of whom. Pure: no clock, no randomness, no device."""

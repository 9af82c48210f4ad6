"""Batching policies: when to launch a batch, and of which requests. Pure: no clock, no I/O, no device."""

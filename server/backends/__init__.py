"""Backends: devices that run batches."""

"""Backends: what runs a batch on a device."""

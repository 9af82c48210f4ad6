"""Batchwright's Python interface."""

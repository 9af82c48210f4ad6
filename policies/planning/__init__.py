"""Capacity planning: devices, prices and numbers of bins."""

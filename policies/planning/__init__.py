"""Capacity planning: number of devices, cost, and recommendation of bins."""

"""Objectives: the frontier over weights, bounds, and tables of policies over arrival rates."""

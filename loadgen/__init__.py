"""Loads a server, or a simulation of it, by an open loop and reports what came back."""

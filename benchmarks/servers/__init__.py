"""Servers that the benchmark scripts and the system tests start as processes of their own."""

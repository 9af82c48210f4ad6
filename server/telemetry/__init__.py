"""Telemetry: metrics, statistics, history, logs and traces."""

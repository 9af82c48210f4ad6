"""Scripts that measure, and the records they made. Timings belong here, never in tests."""

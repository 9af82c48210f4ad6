"""The tables and figures of the SMDP papers, computed again beside the printed ones: python -m benchmarks.paper."""

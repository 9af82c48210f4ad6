"""Code that reproduces papers and that no command uses; `python -m benchmarks.paper` writes the SMDP papers' page."""

"""Code that reproduces papers and that no command uses; `python -m research.papers` writes the SMDP papers' page."""

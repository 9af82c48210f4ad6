"""Image classifiers."""

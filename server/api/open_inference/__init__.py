"""The Open Inference Protocol v2."""

"""Content of the requests: images, named tensors, raw bodies."""

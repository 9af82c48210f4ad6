"""Content of the requests: images, texts, named tensors."""

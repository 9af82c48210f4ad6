"""Models: their interface, codecs of images and named tensors, and the sources that models are loaded from."""

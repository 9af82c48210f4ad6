"""Models: their interface, codecs of images and texts, and the sources that models are loaded from."""

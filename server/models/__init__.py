"""Models: their interface, preprocessing of images and texts, and the sources that they are loaded from."""

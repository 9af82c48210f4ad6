"""Batches of images on CUDA as captured graphs, from slots of the device that uploads fill while a batch runs."""

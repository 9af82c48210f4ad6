"""Batchwright's Python interface."""

from batchwright.model import Model, Tensor

__all__ = ["Model", "Tensor"]

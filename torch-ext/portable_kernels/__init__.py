"""Portable Triton kernels for training and inference."""

from .rms_norm import add_rms_norm, rms_norm

__all__ = ["rms_norm", "add_rms_norm"]

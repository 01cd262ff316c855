"""Serving: an endpoint's life, the vLLM plugin, and the capture of activations. Imports nothing heavy."""

from .spec import EngineSpec, ServeSpec

__all__ = ["EngineSpec", "ServeSpec"]

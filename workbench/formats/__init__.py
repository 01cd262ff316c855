"""Number formats: one table row per format, one canonical quantized tensor."""

from .table import FORMATS, Format, get_format
from .tensor import QuantizedTensor, quantize

__all__ = ["FORMATS", "Format", "QuantizedTensor", "get_format", "quantize"]

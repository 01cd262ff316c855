"""Number formats: one table row per format, one canonical quantized tensor."""

from .cast import mxfp4_to_nvfp4
from .table import FORMATS, PACKED_FORMATS, Format, get_format, global_scale
from .tensor import QuantizedTensor, quantize

__all__ = [
    "FORMATS", "PACKED_FORMATS", "Format", "QuantizedTensor", "get_format", "global_scale", "mxfp4_to_nvfp4",
    "quantize",
]  # fmt: skip

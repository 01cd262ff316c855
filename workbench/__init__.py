"""Quantization workbench: evidence for low-bit LLM checkpoints.

The front door is ``python -m workbench.run experiment=kimi_requant``; single stages run as ``workbench <command>``.
"""

__version__ = "0.1.0"

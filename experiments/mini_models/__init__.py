"""Mini models: really trained, small checkpoints that ship with the project, and the problems that they solve.

from workbench.mini_models import model_path
model_path("mini_kimi")      # folder with config.json, safetensors shards and tokenizer
"""

from importlib.resources import files
from pathlib import Path

__all__ = ["MODELS", "model_path"]

MODELS = ("mini_kimi", "mini_qwen")


def model_path(name: str = "mini_kimi") -> Path:
    """Folder of a shipped checkpoint in the Hugging Face layout. Raises ValueError for a name that is not in
    `MODELS`."""
    if name not in MODELS:
        raise ValueError(f"no shipped model {name!r}: expected one of {', '.join(MODELS)}")
    return Path(str(files(__name__))) / name

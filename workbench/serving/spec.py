"""What to serve and with what: the two records that describe an endpoint before it exists. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workbench.errors import ConfigError

ENGINES = ("vllm", "external")
# What vLLM 0.26 to 0.33 takes; a card or an attention backend may still refuse one.
KV_CACHE_DTYPES = (
    *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit"),
    *("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6"),
)
STOCK = "stock"  # the backend that is vLLM's own path
DTYPES = ("bfloat16", "float16", "float32", "auto", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """What answers HTTP.

    kind: "vllm" (started here) or "external" (any OpenAI-compatible server, at base_url, e.g. http://host:8000/v1).
    model: the name it answers to ("" = the arm's name for vllm, the first listed model for external).
    port: 0 takes a free one. max_model_len: tokens, 0 = the model's own. dtype: one of DTYPES ("": an external
    server's own).
    startup_timeout_s: seconds until the first healthy answer. enforce_eager: no torch.compile, no CUDA graphs.
    args: any flag of the engine, {"--max-num-seqs" or "max_num_seqs": value}; True is a bare flag, False and None
    leave it out. They come last, so they override what the workbench chose. env: environment variables.
    numerics: whether the worker probes what it runs once it is warm (vllm only), for the numerics card.
    Raises ConfigError naming the setting for a value that no engine could take.
    """

    kind: str = "vllm"
    base_url: str = ""
    model: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    tensor_parallel_size: int = 1
    max_model_len: int = 0
    dtype: str = "bfloat16"
    startup_timeout_s: float = 600.0
    enforce_eager: bool = True
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    numerics: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ENGINES:
            raise ConfigError(f"unknown engine {self.kind!r}", fix=f"choose one of: {', '.join(ENGINES)}")
        if self.kind == "external" and not self.base_url:
            raise ConfigError("engine external needs a base_url", fix="engine.base_url=http://host:8000/v1")
        if self.base_url and (wrong := _wrong_url(self.base_url)):
            raise ConfigError(
                f"engine.base_url={self.base_url!r} is no URL: {wrong}", fix="engine.base_url=http://host:8000/v1"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"engine.dtype={self.dtype!r}", fix="choose bfloat16, float16, float32 or auto")
        if self.kind == "vllm" and not self.dtype:
            raise ConfigError("engine.dtype is empty", fix="choose bfloat16, float16, float32 or auto")
        _at_least("port", self.port, 0, "use 0 (a free port) to 65535")
        if self.port > 65535:
            raise ConfigError(f"engine.port={self.port!r}", fix="use 0 (a free port) to 65535")
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1, "use the number of devices, 1 or more")
        _at_least("max_model_len", self.max_model_len, 0, "use a number of tokens, or 0 for the model's own")
        timeout = self.startup_timeout_s
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout) or timeout <= 0:
            raise ConfigError(f"engine.startup_timeout_s={timeout!r}", fix="use seconds above 0, for example 600")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSpec:
    """One arm to serve.

    checkpoint: a folder, or "hf://org/name" in the local Hub cache.
    backend: "reference" (decoded weights, exact activations), "emulation" (packed weights, activations rounded through
    the weight format), "requant" (converted to `format` by scale rule `rule` as it loads, then emulated) or "stock"
    (vLLM's own path for the checkpoint, our plugin switched off).
    activations: "auto" (the weight format's own quantize-dequantize; none under reference) or "none".
    compat: "none" (every matrix keeps its own scales) or "vllm" (they are combined as vLLM's own NVFP4 methods combine
    them; emulation only).
    exclude: module patterns; what they cover runs unquantized (decoded where the checkpoint quantizes it).
    """

    arm: str
    checkpoint: Path | str
    backend: str = "reference"
    format: str | None = None
    rule: str | None = None
    activations: str = "auto"
    compat: str = "none"
    exclude: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    engine: EngineSpec = field(default_factory=EngineSpec)

    def __post_init__(self) -> None:
        check_kv_cache_dtype(self.kv_cache_dtype)
        if self.backend == STOCK and (self.format or self.rule or self.exclude):
            raise ConfigError(
                "backend stock is vLLM's own path: it takes no format, scale rule or exclude",
                fix="drop them, or choose backend=requant (or emulation)",
            )


def check_kv_cache_dtype(dtype: str) -> None:
    """Raise ConfigError unless vLLM knows the KV cache dtype."""
    if dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype={dtype!r}",
            fix=f"choose one of: {', '.join(KV_CACHE_DTYPES)}; engine.args passes any other value through",
        )


def _at_least(name: str, value: Any, least: int, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"engine.{name}={value!r}", fix=fix)


def _wrong_url(url: str) -> str:
    """What is wrong with an http(s) URL; "" for a good one."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "it does not start with http:// or https://"
    if not parts.hostname or any(c.isspace() for c in url):
        return "it names no host" if not parts.hostname else "it holds a space"
    return "port 0 answers nothing" if port == 0 else ""

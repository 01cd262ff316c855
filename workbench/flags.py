"""What the rooms say of settings, in the words of the command line.

    in_flags("engine.port=99999", {"port"})   # "--port 99999"

The rooms' errors name settings as experiments write them (`engine.port=99999`, `backend=requant`); whoever typed a
command has its flags instead. Only flags that the command has are put in.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_NAMES = {
    **{
        f"engine.{name}": name
        for name in ("host", "port", "dtype", "tensor_parallel_size", "max_model_len", "concurrency")
    },
    "engine.args": "engine_arg",
    "engine.env": "engine_env",
    "engine.model": "name",
    "engine.served_model": "name",
    "lint.allow": "allow",
    **{name: name for name in ("backend", "compat", "kv_cache_dtype", "max_model_len", "activations", "exclude")},
    **{name: name for name in ("api", "chat_template", "max_length", "format", "rule")},
}
_SWITCHES = {"chat_template"}
_OF_AN_ARM = {"format", "rule", "exclude"}  # beside --requant these flags are its own, not those of an --arm
_LONGEST_FIRST = sorted(_NAMES, key=len, reverse=True)
_SETTING = re.compile(rf"(?<![\w.,/-])({'|'.join(map(re.escape, _LONGEST_FIRST))})\b(=?)")
_VALUE = re.compile(r"\[?'([^']*)'\]?|[^\s,;()]+")


def in_flags(text: str, known: Collection[str]) -> str:
    """`text` with every setting that is a flag of the command (`known`: their destinations) written as that flag."""
    known = set(known) - (_OF_AN_ARM if "requant" in known else set())
    found, place = [], 0
    for match in _SETTING.finditer(text):
        name, sign = match.groups()
        if match.start() < place or _NAMES[name] not in known or not (sign or "." in name):
            continue
        flag, end = f"--{_NAMES[name].replace('_', '-')}", match.end()
        value = _VALUE.match(text, end) if sign else None
        if value is not None:
            shown = value[1] if value[1] is not None else value[0]
            flag, end = flag if name in _SWITCHES else f"{flag} {shown}".rstrip(), value.end()
        found += [text[place : match.start()], flag]
        place = end
    return "".join([*found, text[place:]])

"""docs/schema.md names every column of both tables, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from workbench.records import GemmRecord, TensorRecord

SCHEMA = Path(__file__).parents[2] / "docs" / "schema.md"


@pytest.mark.parametrize(("title", "record"), [("tensors.parquet", TensorRecord), ("gemm.parquet", GemmRecord)])
def test_schema_documents_every_column(title: str, record: type) -> None:
    section = SCHEMA.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    documented: list[str] = []
    for cell in re.findall(r"^\| ([\w, ]+) \|", section, flags=re.MULTILINE):
        names = [name.strip() for name in cell.split(",")]
        base = names[0].removesuffix("_low")
        documented += [base + name if name.startswith("_") else name for name in names]
    assert sorted(set(documented) - {"column"}) == sorted(f.name for f in dataclasses.fields(record))

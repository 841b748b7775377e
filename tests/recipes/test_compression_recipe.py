"""The recipe of compressors: its formulas are those of a plan, and its table reads records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.config.compose.groups import shipped_conf
from runner.config.compose.resolve import resolve
from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import Wire
from runner.optim.catalogue.registry import COMPRESSORS, compression_of
from runner.recipes.compression.__main__ import write
from runner.recipes.compression.table import FORMULAS, formula_bytes, sweep_report

SHAPES = [(64, 48), (64,), (8, 16, 4)]


def section_of(name: str) -> CompressionConfig:
    return resolve([f"compression={name}", "model=mlp", "parallelism.data=2"]).compression


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_formulas_of_the_recipe_are_those_of_the_kinds(name: str, replicas: int) -> None:
    section = section_of(name)
    expected = replicas * compression_of(section).bytes_in_a_step(Wire(section, SHAPES, 4, replicas))
    assert formula_bytes(SHAPES, vars(section), replicas) == pytest.approx(expected, rel=2e-3)


def test_the_sweep_has_every_compressor() -> None:
    text = (shipped_conf() / "recipe" / "compression.yaml").read_text(encoding="utf-8")
    assert sorted(text.split("compression: [")[1].split("]")[0].split(", ")) == sorted(COMPRESSORS)
    assert sorted(FORMULAS) == sorted(COMPRESSORS)


def test_the_table_reads_records(tmp_path: Path) -> None:
    layer = {"trained_shapes": SHAPES}
    profile = {"layers": [layer], "loss": {"trained_shapes": []}, "shared": []}
    (tmp_path / "profile.json").write_text(json.dumps(profile), encoding="utf-8")

    def run(name: str, sent: float, status: str = "ok") -> dict[str, Any]:
        record = {
            "status": status, "config": {"compression": vars(section_of(name))}, "layout": {"data": 2},
            "bytes_moved": {"weight_gradients": sent}, "loss": [3.0, 1.0], "val_loss": [[2, 1.5]],
        }  # fmt: skip
        return {"directory": str(tmp_path), "record": record}

    elements = 64 * 48 + 64 + 8 * 16 * 4
    made = sweep_report([run("none", 8.0 * elements), run("bf16", 4.0 * elements), run("topk", 0.0, "failed")])
    (table,) = made["tables"]
    assert [row[0] for row in table["rows"]] == ["none", "bf16"]
    assert table["values"][1][2:] == (4.0 * elements, 0.5, 4 * elements, 1.0, 2.0, 1.5)
    assert "topk: failed" in table["notes"]
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- compression -->\nold\n<!-- end of compression -->\nb\n", encoding="utf-8")
    write(tmp_path, "compression", made)
    text = readme.read_text(encoding="utf-8")
    assert "| bf16 |" in text
    assert "old" not in text
    assert text.endswith("![compression: losses](losses.svg)\n\n<!-- end of compression -->\nb\n")
    assert (tmp_path / "losses.svg").stat().st_size > 1000

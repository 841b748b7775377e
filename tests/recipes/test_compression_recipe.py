"""The recipe of compressors: its formulas are those of a plan, and its table reads records."""

from __future__ import annotations

import functools
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
from runner.recipes.compression.link import Timed, main, rows_of, running_mean, verdicts
from runner.recipes.compression.table import FORMULAS, formula_bytes, sweep_report

SHAPES = [(64, 48), (64,), (8, 16, 4)]


@functools.cache
def section_of(name: str) -> CompressionConfig:
    return resolve([f"compression={name}", "model=mlp", "parallelism.data=2"]).compression


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_of_the_recipe_are_those_of_the_kinds(name: str, replicas: int) -> None:
    section = section_of(name)
    expected = replicas * compression_of(section).bytes_in_a_step(Wire(section, SHAPES, 4, replicas))
    assert formula_bytes(SHAPES, vars(section), replicas) == pytest.approx(expected, rel=2e-3)


def test_the_sweep_has_the_compressors_of_the_table() -> None:
    text = (shipped_conf() / "recipe" / "compression.yaml").read_text(encoding="utf-8")
    assert sorted(text.split("compression: [")[1].split("]")[0].split(", ")) == sorted(FORMULAS)
    assert set(FORMULAS) <= set(COMPRESSORS)


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


def test_the_sweeps_differ_in_model_and_data_alone() -> None:
    gpt, emoji = (resolve([f"recipe={name}"]) for name in ("compression", "compression_emoji"))
    for key in ("sweep", "parallelism", "schedule", "optimizer", "trainer", "compression"):
        assert getattr(gpt, key) == getattr(emoji, key), key
    assert gpt.data.batch_size == emoji.data.batch_size


def test_seconds_to_the_loss_of_plain_sums() -> None:
    losses = {"none": [10.0 - 0.1 * step for step in range(80)]}
    losses["bf16"] = losses["none"]
    losses["topk"] = [10.0 - 0.05 * step for step in range(80)]  # the same loss after twice the steps
    losses["randomk"] = [10.0] * 80
    timed = {
        "none": Timed([0.19], [0.2, 0.2, 9.0]), "bf16": Timed([0.16], [0.15]),
        "topk": Timed([0.06], [0.05]), "randomk": Timed([0.05], [0.05]),
    }  # fmt: skip
    rows = {row.compression: row for row in rows_of(losses, timed)}
    assert rows["none"].steps == rows["bf16"].steps == 40
    assert rows["none"].seconds == pytest.approx(8.0)
    assert rows["bf16"].sooner == pytest.approx(0.25)
    assert rows["bf16"].loss_then == pytest.approx(running_mean(losses["none"])[52])  # 53 steps of 0.15 s in 8 s
    # The mean of 20 steps lags by 9.5 of them: 10 - 0.05 (s - 1 - 9.5) <= 10 - 0.1 (39 - 9.5) from s = 69.5 on.
    assert rows["topk"].steps == 70
    assert rows["randomk"].steps is None
    assert rows["none"].off == pytest.approx(-0.05)
    near, best = verdicts(list(rows.values()))
    assert near.startswith("3 of 4")
    assert best.endswith("topk: 3.5 s instead of 8.0 s, 56% less.")


def test_a_slower_compressor_is_told_as_one() -> None:
    losses = {name: [3.0 - 0.01 * step for step in range(80)] for name in ("none", "qsgd")}
    rows = rows_of(losses, {"none": Timed([0.1], [0.1]), "qsgd": Timed([0.1], [0.2])})
    assert verdicts(rows)[1].endswith("qsgd: 8.0 s instead of 4.0 s, 100% more.")
    losses["qsgd"] = [9.0] * 80
    assert verdicts(rows_of(losses, {name: Timed([0.1], [0.1]) for name in losses}))[1].startswith("No compressor")


def test_folders_that_are_no_sweeps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for folder, said in (("nowhere", "runner train -m recipe=compression"), ("empty", "compression=none")):
        with pytest.raises(SystemExit) as stop:
            main([str(tmp_path / folder)])
        assert stop.value.code == 2
        assert said in capsys.readouterr().err

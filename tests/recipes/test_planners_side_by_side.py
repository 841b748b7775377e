"""The recipe that compares planners: its models, the table of the survey, and its pages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.launch.run.layout_judge import without_search
from runner.plan.planners.problem import alone
from runner.plan.planners.published.registry import KINDS
from runner.recipes import planners
from runner.recipes.planners import graphs, moves, nodes, unlike
from runner.recipes.planners.__main__ import markdown, measured_lines
from runner.recipes.planners.figures import draw
from runner.recipes.planners.halves import FORWARD, formula, halves
from runner.recipes.planners.halves import lines as lines_of_halves
from runner.recipes.planners.measured import SECONDS, asleep, judged, problem
from runner.recipes.planners.models import Sleep, convolutional, images, sleeping
from runner.recipes.planners.policy import CHAINS, reached
from runner.recipes.planners.policy import lines as lines_of_policy
from runner.recipes.planners.table4 import PRINTED, differences, lines
from runner.recipes.planners.workloads import WORKLOADS, Workload


def test_the_models_are_what_the_workloads_say() -> None:
    net = convolutional(width=4, classes=10)
    assert len([each for each in net.modules() if isinstance(each, torch.nn.Conv2d)]) == 13
    picture, target = images(2, classes=10)[0]
    assert net(picture[None]).shape == (1, 10)
    assert 0 <= int(target) < 10
    assert [each.seconds for each in sleeping((0.5, 0.25)) if isinstance(each, Sleep)] == [0.5, 0.25]
    assert len({each.name for each in WORKLOADS}) == len(WORKLOADS)


def test_every_planner_is_asked_for_the_layers_that_sleep_and_its_layout_is_played() -> None:
    rows = asleep()
    assert [row["planner"] for row in rows] == ["joint", *KINDS]
    alone = 3 * 32 * sum(SECONDS) / 4
    ran = [row for row in rows if row["why_not"] is None]
    assert len(ran) >= 8
    for row in ran:
        assert row["judged_seconds"] >= alone * (1 - 1e-9), "four devices cannot compute faster"
        assert any(word.startswith("parallelism.pipeline=") for word in row["overrides"])
    fitting = [row["judged_seconds"] for row in ran if row["fits"]]
    assert rows[0]["fits"]
    assert rows[0]["judged_seconds"] <= min(fitting) * 1.001
    assert judged(problem(), KINDS["beaumont"].plan(problem())) > 0  # type: ignore[arg-type]


def test_table_4_names_planners_of_the_catalogue_and_where_they_differ() -> None:
    text = list(lines())
    assert len(text) == 2 + len(PRINTED) == 14
    assert differences("PipeDream") == differences("Piper") == differences("GPipe") == ""
    assert differences("Megatron-LM") == "decides checkpointing, too"
    assert all(row.planner in KINDS for row in PRINTED.values() if row.planner is not None)


def test_the_page_has_the_samples_of_a_policy_that_learns() -> None:
    """A cut that it draws is near the best long before its own choice is; the page has the chains' own figures."""
    page = (Path(planners.__file__).parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith("| 10 | ")] == list(lines_of_policy([9]))[2:]
    assert list(lines_of_policy([0], rounds=3))[2].endswith("| not in 48 |")
    rows = [line for line in page if line.startswith(tuple(f"| {chain} | " for chain in range(1, CHAINS + 1)))]
    assert len(rows) == CHAINS
    quick = reached(9, rounds=40)
    assert quick.samples == 640
    assert quick.sample is not None
    assert quick.choice is not None
    assert quick.sample < quick.choice
    assert 0.005 < quick.near < 0.1


def test_halving_the_first_microbatch_saves_what_the_formula_says() -> None:
    """Of the played step; what was measured is beside it, from a run of the recipe."""
    rows = halves()
    whole, halved = (row["judged_seconds"] for row in rows)
    assert whole == pytest.approx((8 + 3) * 3 * FORWARD, rel=1e-12)
    assert whole - halved == pytest.approx(formula(), rel=1e-12)
    assert formula() == pytest.approx(3 * 0.16 / 2)
    assert "schedule.shares=[1,1,2,2,2,2,2,2,2]" in rows[1]["overrides"]
    assert list(lines_of_halves(rows))[-1] == "| saved; by the formula 0.240 s | 0.240 s | - |"
    slept = [row | {"measured_seconds": seconds} for row, seconds in zip(rows, (5.5, 5.25), strict=True)]
    assert list(lines_of_halves(slept))[-1] == "| saved; by the formula 0.240 s | 0.240 s | 0.250 s |"


def test_the_page_has_devices_of_unlike_speed_beside_even_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are good requests for three ranks."""
    asked = list[list[str]]()

    def noted(folder: Path, *words: str) -> SimpleNamespace:
        asked.append([*words])
        return SimpleNamespace(
            record={"step_seconds": {"predicted": 1.0, "median": 2.0 if "partition=uniform" in words else 1.0}}
        )

    monkeypatch.setattr(unlike, "train", noted)
    rows = unlike.compared(Path("runs"))
    assert [resolve(words).parallelism.pipeline for words in asked] == [3] * 6
    assert [line.split("|")[-2] for line in unlike.lines(rows)][2:] == [
        " 1.00 times ",
        " 2.00 times ",
        " 2.00 times ",
    ] * 2


def test_the_page_has_what_a_move_of_layers_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs are good requests, in which layers move at six steps."""
    asked = list[list[str]]()

    def noted(folder: Path, *words: str) -> SimpleNamespace:
        asked.append([*words])
        moved = [{"bytes": 1000, "seconds": seconds} for seconds in (0.1, 0.2, 0.6)]
        return SimpleNamespace(record={"step_seconds": {"median": 0.4}, "layer_moves": moved})

    monkeypatch.setattr(moves, "train", noted)
    rows = moves.moves(Path("runs"))
    configs = [resolve(words) for words in asked]
    assert not any(rules(config) for config in configs)
    assert [len(config.partition.migrate or ()) for config in configs] == [6, 6]
    assert "| one block of four | 1.00 kB | 200 ms | 600 ms | 400 ms | 0.50 |" in list(moves.lines(rows))[2]


def test_the_page_has_two_nodes_with_a_slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search takes the pipeline across nodes and replicas inside, and layers weigh what it is told."""
    asked = list[list[str]]()

    def noted(folder: Path, *words: str) -> SimpleNamespace:
        asked.append([*words])
        return SimpleNamespace(record={"step_seconds": {"predicted": 1.0, "median": float(len(asked))}})

    monkeypatch.setattr(nodes, "train", noted)
    rows = nodes.nodes(Path("runs"))
    configs = [resolve(words) for words in asked]
    assert not any(rules(config) for config in configs)
    degrees = [(each.parallelism.pipeline, each.parallelism.data, each.parallelism.order) for each in configs]
    assert degrees == [(2, 2, None), (2, 2, "pipeline_inside"), (1, 4, None), (4, 1, None)]
    assert list(nodes.lines(rows))[3].endswith("| 1.000 s | 2.000 s | 2.00 times |")
    layers = sleeping(nodes.LAYERS, nodes.WIDTH)
    weights = [4.0 * sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    assert weights == list(nodes.asked().divisions[0].weight)
    assert layers(torch.zeros(0, 8)).shape == (0, 8)


def test_pages_are_made_of_rows(tmp_path: Path) -> None:
    row = {
        "workload": "GPT", "planner": "joint", "search_seconds": 1.25, "own_seconds": 0.5, "planned_seconds": 1.0,
        "peak_bytes": 2e9, "fits": True, "layout": "2·2·1 1f1b, T = 8", "why_not": None,
    }  # fmt: skip
    none = row | {"planner": "alpa", "planned_seconds": None, "peak_bytes": None, "fits": None, "layout": None}
    text = markdown([row, none | {"why_not": "it cannot"}])
    assert text[2] == "| GPT | `joint` | 1.2 s | 500 ms | 1 s | 2.00 GB | yes | 2·2·1 1f1b, T = 8 |"
    assert text[3].endswith("| - | - | - | it cannot |")
    assert "GPT" in draw(tmp_path / "made.svg", [row, none]).read_text(encoding="utf-8")
    slept = measured_lines([{"planner": "rl", "layout": "x", "why_not": None, "fits": False, "judged_seconds": 1.5}])
    assert slept[2] == "| `rl` | x | no | - | 1.50 s | - |"


def test_a_graph_in_the_public_format_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers side by side between two others: two stages of two layers, between which two messages go."""
    ways = [
        {"timePerSample": time, "parameterSize": 0.0, "memoryUsageA": saved, "memoryUsageB": 1e9}
        for time, saved in ((2.0, 1e9), (3.0, 1e8))
    ]
    edges = [(10, 20), (10, 30), (20, 40), (30, 40)]
    nodes = [
        {
            "id": node,
            "TMPCs": {
                "1": [
                    each
                    | {"syncTimeFw": {str(a): 0.0 for a, b in edges if b == node}}
                    | {"syncTimeBw": {str(b): 0.5 for a, b in edges if a == node}}
                    for each in ways
                ]
            },
        }
        for node in (40, 10, 20, 30)
    ]
    document = {"maxDevices": 2, "maxMemoryPerDevice": 9e9, "bandwidth": 10.0, "mbsInBatch": 7, "nodes": nodes}
    cut = [{"sourceId": one, "destId": other, "communicationCost": 1.0} for one, other in edges]
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(document | {"edges": cut}), encoding="utf-8")
    graphs.main([str(file)])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "4.6 for a micro-batch, 2 stages"  # two layers of 2 s, and two messages of 1.5 there and back
    assert told[1] == "2 layers from 10: 1 replicas in 1 parts, 0 by the second way"
    graphs.main([str(file), "--memory=5.2GB", "--exact"])
    assert capsys.readouterr().out.startswith("5.6 for a micro-batch, 2 stages\n")  # one layer of the first runs again
    graphs.main([str(file), "--memory=2GB"])
    assert capsys.readouterr().out == "nothing fits 2 devices of 2.00 GB\n"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.name)
def test_each_workload_is_a_request(workload: Workload) -> None:
    config = resolve([*workload.words, "parallelism=auto"])
    assert not rules(without_search(alone(config)))
    assert config.parallelism.ranks in (4, 8, 64)
    assert config.data.batch_size % config.parallelism.ranks == 0

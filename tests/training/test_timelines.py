"""The pictures of a run: what was predicted and what was measured are the same actions on the same ranks."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import pytest
import torch
from layouts import make_engine, part_of
from plan_profiles import layer
from plan_profiles import model as profile_of
from torch import nn

from runner.config.schema import RunConfig
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.training.measure.measures import RankMeasures
from runner.training.measure.timelines import draw_timelines

COUNT = 4  # micro-batches


def planned(schedule: str) -> RunPlan:
    config = RunConfig(memory_limit="1GB")
    config.schedule.name, config.schedule.microbatches = schedule, COUNT
    config.parallelism.pipeline, config.data.batch_size = 2, COUNT
    return make_plan(config, profile_of([layer()] * 4))


def measured(plan: RunPlan) -> list[RankMeasures]:
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))) for _ in range(2)]
    batch = torch.randn(COUNT, 3), torch.randn(COUNT, 3)

    def run(transport: ThreadTransport) -> RankMeasures:
        engine = make_engine(
            models[transport.rank], nn.functional.mse_loss, transport, schedule=plan.schedule, pipeline=2, data=1,
            count=COUNT, optimizer=partial(torch.optim.SGD, lr=0.1),
        )  # fmt: skip
        engine.submit(part_of(batch, transport, 2, 1, plan.schedule))
        engine.drain()
        return RankMeasures(tuple(engine.timeline.steps), dict(engine.timeline.events), 0, 0, {})

    return run_ranks(2, run)


@pytest.mark.parametrize("schedule", ["zb_v", "varuna"])
def test_predicted_and_measured_show_the_same_actions(tmp_path: Path, schedule: str) -> None:
    plan = planned(schedule)
    made = draw_timelines(tmp_path, plan, measured(plan), {0: 1.0})
    trace = json.loads((tmp_path / made["trace"]).read_text(encoding="utf-8"))["traceEvents"]
    groups = {event["args"]["name"]: event["pid"] for event in trace if event["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    orders = {}
    for name, group in groups.items():
        done = sorted((e for e in trace if e["ph"] == "X" and e["pid"] == group), key=lambda event: event["ts"])
        orders[name] = [[e["name"] for e in done if tracks[group, e["tid"]] == f"rank {rank}"] for rank in range(2)]
    expected = [[str(action) for action in row] for row in plan.schedule.actions]
    assert orders == {"predicted": expected, "measured": expected}
    picture = ElementTree.parse(tmp_path / made["timeline"]).getroot()
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.index(f"{schedule}, predicted") < texts.index("step 1, measured")
    assert texts.count("rank 1") == 2


def test_no_picture_where_no_timed_step_was_kept(tmp_path: Path) -> None:
    plan = planned("1f1b")
    assert draw_timelines(tmp_path, plan, measured(plan), {}) == {}
    assert list(tmp_path.iterdir()) == []

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from runner.schedule import SPECS, Costs, Schedule, StageCosts, build, lower, parse_action, simulate
from runner.schedule.render import (
    Event,
    Panel,
    events_of,
    panels_svg,
    timeline_svg,
    timeline_trace,
    timelines_trace,
    to_json,
    to_svg,
    to_text,
    to_trace,
)
from runner.schedule.render.catalogue import catalogue_json, catalogue_text
from runner.schedule.steady import period
from runner.schedule.stream import repeat

SVG = "{http://www.w3.org/2000/svg}"
MINE = build("1f1b", ranks=4, microbatches=8)


def _chunked() -> Schedule:
    rows = ("0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 2B0 1B0")
    actions = tuple(tuple(parse_action(text) for text in row.split()) for row in rows)
    return Schedule("zigzag", ((0, 1, 1, 0),), (0,), actions, chunks=2)


def test_json_document() -> None:
    document = json.loads(json.dumps(to_json(build("1f1b", ranks=2, microbatches=2), Costs())))
    assert document == {
        "schedule": "1f1b",
        "ranks": 2,
        "stages": 2,
        "microbatches": 2,
        "chunks": 1,
        "placement": [[0, 1]],
        "pipeline_of_microbatch": [0, 0],
        "window_of_microbatch": [0, 0],
        "actions": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "costs": {"F": 1, "B": 2, "I": 1, "W": 1, "comm": 0},
        "makespan": 9,
        "bubble_ratio": pytest.approx(1 / 3),
        "steady_bubble_ratio": None,
        "inner_idle": [3, 0],
        "peak_activations": [2, 1],
        "weight_versions": [1, 1],
        "updates": [[[0, 0, 4]], [[1, 0, 4]]],
        "versions": {"F": [[0, 0], [0, 0]], "B": [[0, 0], [0, 0]]},
    }


def test_json_of_several_windows() -> None:
    document = to_json(repeat(build("gpipe", ranks=2, microbatches=2), 3), Costs())
    assert document["window_of_microbatch"] == [0, 0, 1, 1, 2, 2]
    assert document["updates"][1] == [[1, 0, 4], [1, 1, 8], [1, 2, 12]]
    assert document["versions"]["B"][4] == [2, 2]
    assert document["makespan"] == 27
    assert document["bubble_ratio"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="windows = 0"):
        repeat(MINE, 0)


@pytest.mark.parametrize(
    ("name", "ratio"), [("zb_h2", 0), ("zb_v", 0), ("zb_h1", 1 / 9), ("1f1b", 3 / 11), ("v_half", 0.2)]
)
def test_windows_without_a_barrier_tile(name: str, ratio: float) -> None:
    """What is left of the bubble is the idle time between a rank's first and last action."""
    step = build(name, ranks=4, microbatches=8)
    stream = repeat(step, 3)
    document = to_json(stream, Costs(), period=period(step, Costs()))
    assert document["steady_bubble_ratio"] == pytest.approx(ratio, abs=1e-9)
    if ratio == 0:  # one window's skew for all three
        assert document["makespan"] == simulate(step, Costs()).makespan + 2 * 24
        assert document["inner_idle"] == [0] * 4
    assert f"{name}: 4 ranks, 3 steps of 8 micro-batches" in to_svg(stream, Costs())


def test_mark_points_at_the_cell() -> None:
    lines = to_text(MINE, Costs(), mark=(2, 4)).splitlines()
    assert lines[3].endswith("^^ here: 2B1 (rank 2, cell 4)")
    place = lines[3].index("^")
    assert lines[2][place : place + 2] == "bb"
    assert lines[-1] == "span 33, bubble 27.3 % of all rank time"


def test_plain_order() -> None:
    lines = to_text(MINE).splitlines()
    assert lines[3] == "r3 |3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"
    marked = to_text(lower(MINE), mark=(2, 20)).splitlines()
    assert marked[3].strip() == "^^^ here: 2B2 (rank 2, cell 20)"
    assert marked[2][marked[3].index("^") :].startswith("2B2 ")
    assert marked[-1] == "cells 12 to 28 of 50"


def test_rows_of_chunks_and_split_backwards() -> None:
    lines = to_text(_chunked(), Costs()).splitlines()
    assert lines[:4] == ["r0.0 |0..  ....a A", "r0.1 | ..0a.... A ", "r1.0 |.0 ..  aa...", "r1.1 |. 0..aa  ..."]
    assert lines[4].startswith("one character = 0.5;")


def test_a_long_schedule_is_scaled_to_the_screen() -> None:
    lines = to_text(build("1f1b", ranks=2, microbatches=200), Costs()).splitlines()
    assert max(len(line) for line in lines[:2]) == 166
    assert lines[2].startswith("one character = about 3.77;")


def _rectangles(svg: str) -> list[ElementTree.Element]:
    return [shape for shape in ElementTree.fromstring(svg).iter(f"{SVG}rect") if shape.find(f"{SVG}title") is not None]


def test_svg_shows_every_action() -> None:
    svg = to_svg(MINE, Costs())
    shapes = _rectangles(svg)
    times = simulate(MINE, Costs())
    assert len(shapes) == sum(len(row) for row in MINE.actions)
    drawn = {str(shape.findtext(f"{SVG}title")): shape for shape in shapes}
    for rank, row in enumerate(MINE.actions):
        for index, action in enumerate(row):
            width = (times.end[rank][index] - times.start[rank][index]) / times.makespan * 900
            assert float(drawn[str(action)].attrib["width"]) == pytest.approx(width, abs=0.01)
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "1f1b: 4 ranks, 8 micro-batches, F 1, B 2, bubble 27.3 %" in texts
    assert {"rank 0", "rank 3", "forward", "backward", "idle", "time", "30"} <= set(texts)


def test_svg_of_a_program_shows_messages_in_their_own_lane() -> None:
    costs = StageCosts(F=(1,) * 4, B=(2,) * 4, comm=(0.5,) * 3, reduce=(1,) * 4, step=(1,) * 4)
    svg = to_svg(lower(MINE), costs, title="a < b", unit="ms")
    heights = {str(s.findtext(f"{SVG}title")): s.attrib["height"] for s in _rectangles(svg)}
    assert heights["0SEND_F0>1"] != heights["0F0"] == heights["0STEP"]
    texts = {text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")}
    assert {"a < b", "time / ms", "send", "gradient reduction", "optimizer step"} <= texts


def test_svg_tints_chunks_and_takes_a_shared_span() -> None:
    shapes = {str(s.findtext(f"{SVG}title")): s for s in _rectangles(to_svg(_chunked(), Costs()))}
    assert shapes["0F0"].attrib["fill"] != shapes["3F0"].attrib["fill"]
    event = Event(0, "data", None, None, 2.0, 4.0)
    (shape,) = _rectangles(timeline_svg([event], title="t", span=(0.0, 8.0)))
    assert float(shape.attrib["width"]) == pytest.approx(225)
    assert ElementTree.fromstring(timeline_svg([], title="nothing happened")).tag == f"{SVG}svg"


def test_trace_has_every_action_at_its_time() -> None:
    program = lower(MINE)
    trace = json.loads(json.dumps(to_trace(program, Costs(comm=0.5), seconds_per_unit=2.0)))
    complete = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert len(complete) == sum(len(row) for row in program.actions)
    assert complete["1F0"]["ts"] == pytest.approx(1.5 * 2e6)
    assert complete["1F0"]["dur"] == pytest.approx(2e6)
    assert complete["1F0"]["args"] == {"stage": 1, "microbatch": 0}
    assert complete["1F0"]["tid"] != complete["1SEND_F0>2"]["tid"]
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names[complete["1F0"]["tid"]] == "rank 1"


def test_measured_events_use_the_same_drawings() -> None:
    measured = [Event(0, "F", 0, 3, 0.5, 1.5), Event(0, "data", None, None, 0.0, 0.5)]
    trace = timeline_trace(measured)
    assert [event["name"] for event in trace["traceEvents"]] == ["thread_name", "0F3", "data"]
    assert len(_rectangles(timeline_svg(measured, title="measured"))) == 2
    assert events_of(MINE, Costs())[0] == Event(0, "F", 0, 0, 0.0, 1.0, "0F0")


def test_panels_share_one_time_scale() -> None:
    """The same work, once at double speed: half as wide, below, and in the other group of the trace."""
    slow = events_of(MINE, Costs())
    fast = [event._replace(start=event.start / 2, end=event.end / 2) for event in slow]
    picture = panels_svg([Panel("slow", slow), Panel("fast", fast)])
    shapes = _rectangles(picture)
    above, below = ([s for s in part if s.findtext(f"{SVG}title") == "3B7"][0] for part in (shapes[:64], shapes[64:]))
    for key in ("x", "width"):
        left = 64 if key == "x" else 0
        assert float(above.attrib[key]) - left == pytest.approx(2 * (float(below.attrib[key]) - left), abs=0.03)
    idle = [s for s in ElementTree.fromstring(picture).iter(f"{SVG}rect") if s.attrib["fill"] == "#f1f2f4"]
    assert [float(shape.attrib["width"]) for shape in idle] == [900] * 4 + [450] * 4 + [12], "to each one's own end"
    lowest = max(float(shape.attrib["y"]) for shape in shapes[:64])
    assert min(float(shape.attrib["y"]) for shape in shapes[64:]) > lowest
    events = timelines_trace({"slow": slow, "fast": fast})["traceEvents"]
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {0: "slow", 1: "fast"}
    assert [e["dur"] for e in events if e["name"] == "3B7"] == [2e6, 1e6]


def test_svg_names_the_chunks() -> None:
    for chunks in (2, 4):
        drawn = to_svg(build("hanayo", ranks=2, microbatches=2, chunks=chunks), Costs())
        texts = [text.text for text in ElementTree.fromstring(drawn).iter(f"{SVG}text")]
        assert [text for text in texts if text and text.startswith("chunk ")] == [f"chunk {c}" for c in range(chunks)]
        assert any(text and f"{chunks} chunks per rank" in text for text in texts)
        forwards = {s.attrib["fill"] for s in _rectangles(drawn) if str(s.findtext(f"{SVG}title"))[1:] == "F0"}
        assert len(forwards) == chunks  # a shade for each
    assert "chunk 0" not in to_svg(MINE, Costs())
    looped, v = (build(name, ranks=4, microbatches=8) for name in ("interleaved_1f1b", "zb_v"))
    both = panels_svg([Panel("looped", events_of(looped, Costs())), Panel("v", events_of(v, Costs()))])
    assert "chunk 1" in both
    assert "chunk 2" not in both


def test_catalogue_says_what_a_script_needs() -> None:
    entries = {entry["name"]: entry for entry in json.loads(json.dumps(catalogue_json()))}
    assert list(entries) == list(SPECS)
    assert entries["1f1b"]["aliases"] == ["dapple"]
    assert entries["zb_h2"]["constraints"]["schedule.microbatches"] == "at least 2 D - 1"
    assert entries["zb_h2"]["formulas"]["when"] == "W <= F and W <= I"
    assert entries["gpipe"]["formulas"]["when"] is None
    assert entries["hanayo"]["formulas"] is None
    assert {entry["data_unit"] for entry in entries.values()} == {"micro-batch", "mini-batch"}
    assert {name for name, entry in entries.items() if entry["kind"] == "asynchronous"} == {
        "ampnet", "pipedream", "pipedream_vsync", "pipedream_2bw", "pipemare", "spectrain", "wpipe", "xpipe",
        "avgpipe", "hetpipe",
    }  # fmt: skip
    text = catalogue_text()
    for entry in entries.values():
        assert f"{entry['source']}\n" in text
        assert all(formula in text for formula in (entry["formulas"] or {}).values() if formula)

"""What is counted on tensors without memory is what a run counts, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from thread_runs import WORDS, result, told

from runner.config.compose.resolve import resolve
from runner.engine.transport.pretended import play_ranks
from runner.errors import DoesNotFitError
from runner.launch.run.prepare import prepare
from runner.training.rehearsal import rehearse_run

_LOGGED = 16  # bytes of the values that the module logs, which Lightning keeps
_GPT = (
    "model=gpt", "model.kwargs.layers=2", "model.kwargs.width=32", "model.kwargs.sequence_length=8",
    "model.kwargs.vocab_size=40", "data.kwargs.sequence_length=8", "data.kwargs.vocab_size=40", "data.batch_size=6",
    "device=cpu", "hardware=laptop_cpu", "trainer.max_steps=4", "checkpoint=none", "logger=none",
)  # fmt: skip


def _peaks(place: Path, words: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """Of the first pipeline's ranks, what a rehearsal and a run have counted."""
    made, _ = result(place, words=words)
    config = resolve([*words])
    plan = prepare(config, place_is_made=True)
    found = rehearse_run(config, plan)
    assert not found.reason
    counted = made["peak_memory_bytes"]["measured"]
    return list(found.peak_bytes), [counted[rank] for rank in plan.topology.pipeline_group(0, 0)]


@pytest.mark.costly
@pytest.mark.parametrize(
    "words",
    [
        ("parallelism.pipeline=2", "schedule=zb_v", "activation_checkpoint=full"),
        ("parallelism.pipeline=2", "schedule=pipedream"),  # of which a plan knows a bound
        ("parallelism.pipeline=2", "offload=activations_async", "offload.delay_seconds=0.001"),
        ("parallelism.tensor=2", "parallelism.sequence=true"),
        ("parallelism.data=2", "precision=bf16_master", "compression=topk"),
        ("optimizer=adamw", "trainer.ema_decay=0.9", "checkpoint.asynchronous=true", "checkpoint.every=2"),
    ],
    ids=lambda words: words[-1].partition("=")[0],
)
def test_a_rehearsed_peak_is_the_one_that_is_counted(words: tuple[str, ...], tmp_path: Path) -> None:
    rehearsed, counted = _peaks(tmp_path, (*_GPT, *words))
    assert rehearsed == counted


def test_a_module_with_its_own_step_is_played_as_it_is(tmp_path: Path) -> None:
    words = (
        "model.target=user_lightning:Whole", "data.target=user_code:points", "data.batch_size=8",
        "device=cpu", "trainer.max_steps=4", "checkpoint=none",
    )  # fmt: skip
    (rehearsed,), (counted,) = _peaks(tmp_path, words)
    assert 0 <= counted - rehearsed <= _LOGGED


@pytest.mark.parametrize("sharing", ["zero.stage=1", "checkpoint.asynchronous=true"])
def test_of_replicas_that_share_states_or_saves_the_fullest_is_counted(sharing: str, tmp_path: Path) -> None:
    words = (*_GPT, "parallelism.pipeline=2", "parallelism.data=3", "schedule=zb_h1", sharing, "checkpoint.every=2")
    made, _ = result(tmp_path, words=words)
    config = resolve([*words])
    plan = prepare(config, place_is_made=True)
    peaks = made["peak_memory_bytes"]["measured"]
    by_position = [[peaks[rank] for rank in range(6) if plan.topology.coordinates(rank).pipe == at] for at in (0, 1)]
    assert rehearse_run(config, plan).peak_bytes == tuple(map(max, by_position))


def test_a_plan_shows_what_was_counted_and_says_so(tmp_path: Path) -> None:
    made, _ = result(tmp_path, words=(*WORDS, "device=cpu", "trainer.max_steps=4"))
    status, said = told("plan", *WORDS, "device=cpu", "--rehearse", "--json")
    document = json.loads(said[said.index("{") :])
    assert (status, document["peak_memory_source"]) == (0, "rehearsed")
    assert document["peak_memory_bytes"] == made["peak_memory_bytes"]["measured"]
    assert [sum(parts.values()) for parts in document["parts"]] == document["peak_memory_bytes"]
    status, said = told("plan", *WORDS, "device=cpu", "--rehearse")
    assert "(rehearsed)" in said


_BOUNDED = (*_GPT, "parallelism.pipeline=2", "schedule=pipedream", "partition=manual", "partition.boundaries=[2]")
"""A request of whose peak a plan knows a bound."""


@pytest.mark.costly
def test_a_limit_below_what_was_counted_is_told() -> None:
    words = ("plan", *_BOUNDED, "--rehearse", "--json")
    status, said = told(*words)
    peak = max(json.loads(said[said.index("{") :])["peak_memory_bytes"])
    assert told(*words, f"memory_limit={peak}")[0] == 0  # the derived bound is above it
    status, said = told(*words, f"memory_limit={peak - 1}")
    assert status == 3
    assert json.loads(said[said.index("{") :])["problems"]


@pytest.mark.costly
def test_what_a_bound_alone_would_refuse_is_counted_first() -> None:
    """A plan and a run whose derived peaks exceed the limit, while the counted ones do not, fit."""
    status, said = told("plan", *_BOUNDED, "--rehearse", "--json")
    peak = max(json.loads(said[said.index("{") :])["peak_memory_bytes"])
    status, said = told("plan", *_BOUNDED, "--json", f"memory_limit={peak}")
    document = json.loads(said[said.index("{") :])
    assert (status, document["fits"], document["peak_memory_source"]) == (0, True, "rehearsed")
    plan = prepare(resolve([*_BOUNDED, f"memory_limit={peak}"]), place_is_made=True)
    assert plan.fits
    assert plan.memory.is_rehearsed
    assert all(part >= 0 for parts in plan.memory.parts for part in parts.as_dict().values())
    with pytest.raises(DoesNotFitError):
        prepare(resolve([*_BOUNDED, f"memory_limit={peak - 1}"]), place_is_made=True)


@pytest.mark.costly
def test_a_run_whose_layers_move_is_rehearsed_cut_by_cut(tmp_path: Path) -> None:
    cut = ("partition=manual", "partition.boundaries=[2]", "partition.migrate={2: [1]}")
    rehearsed, counted = _peaks(tmp_path, (*_GPT, "parallelism.pipeline=2", *cut))
    boundary = 6 * 8 * 32 * 4  # bytes of the samples' tokens between stages
    assert rehearsed[0] == counted[0]
    assert 0 <= rehearsed[1] - counted[1] <= boundary  # a run counts the first step after a move alone


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("zero.stage=3", "parallelism.data=2"), "DeepSpeed"),
        (("parallelism.pipeline=2", "schedule=varuna", "schedule.opportunistic=true"), "depends on what has arrived"),
        (("compile=true",), "compiler"),
    ],
)
def test_what_cannot_be_played_says_why(words: tuple[str, ...], reason: str) -> None:
    config = resolve([*_GPT, *words])
    found = rehearse_run(config, prepare(config, place_is_made=True))
    assert not found.peak_bytes
    assert reason in found.reason


def test_a_plan_says_that_it_is_not_rehearsed() -> None:
    _, said = told("plan", *_GPT, "compile=true", "--rehearse")
    assert "not rehearsed" in " ".join(said.split())


@pytest.mark.parametrize("search", [("parallelism=auto",), ("--planners", "all")], ids=["auto", "planners"])
def test_a_search_is_not_rehearsed(search: tuple[str, ...]) -> None:
    status, said = told("plan", *_GPT, *search, "--rehearse")
    assert status == 2
    assert "the request it prints" in said


def test_ranks_that_wait_for_one_another_end_with_an_error() -> None:
    with pytest.raises(RuntimeError, match="all ranks wait"):
        play_ranks((0, 1), lambda transport: transport.receive_bytes(1 - transport.rank, 0))  # type: ignore[arg-type]

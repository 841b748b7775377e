"""Wrong requests, in this process: the documented status, the cause in one line, nothing written, nothing started."""

# ruff: noqa: E501 - a row of a table stays in one line

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.cli.main import main

BASE = "model.target=user_code:model data.target=user_code:points loss.target=user_code:mean device=cpu"
TWO = "parallelism.pipeline=2 schedule.microbatches=2"
MODEL = "model.target = user_code"
DATA = "data.target = user_code"

REQUESTS = [
    # the model
    ("model.target=none_such:fn", "model.target = none_such:fn: must name a module that imports. Importing none_such raised ModuleNotFoundError"),
    ("model.target=user_code:modell", "Try model.target=user_code:model."),
    ("model.target=user_code.model", "Try model.target=user_code:model."),
    ("model.target=user_code:raising", f"{MODEL}:raising: must make the model. ValueError: the vocabulary is not there (user_code.py:"),
    ("model.target=user_code:leaving", f"{MODEL}:leaving: must make the model. SystemExit: 3"),
    ("model.target=user_code:nothing", "It returned a NoneType."),
    ("model.target=user_code:number", "It returned a int."),
    ("model.kwargs.widht=3", "Try model.kwargs.width="),
    ("model.target=user_code:empty_sequential", "must have at least one layer. It returned an empty Sequential."),
    ("model.target=user_code:ListsNothing", "must have at least one layer. layers() is empty."),
    ("model.target=user_code:ListsNumbers", "must list modules, or callables that make them. layers()[1] is a int."),
    ("model.target=user_code:frozen", "must have parameters to train. None of its parameters requires a gradient."),
    ("model.target=user_code:giving_none", "model.target = layer 1 (Gives): must return tensors, not a NoneType."),
    (f"model.target=user_code:giving_text {TWO}", "model.target = layer 1 (Gives): must return tensors, not a str."),
    ("model.target=user_code:giving_an_object", "layer 1 (Gives) must return what can pass to the next layer. An object cannot pass between layers: only tensors"),
    ("model.split_points=[3] parallelism.pipeline=2", "applies to a module without layers, which is traced. user_code:model lists 7 layers."),
    # the data
    ("data.target=user_code:raising", f"{DATA}:raising: must make the data. ValueError: the vocabulary is not there"),
    ("data.target=user_code:number", "A int has no items by number"),
    ("data.target=user_code:Items data.kwargs.count=0", f"{DATA}:Items: must have at least one sample."),
    ("data.target=user_code:PassingOnce", "must give its samples anew each time it is iterated."),
    ("data.target=user_code:passing data.shuffle=true", "data.shuffle = true: must be null or false for an iterable dataset."),
    ("data.target=user_code:Items data.kwargs.wrong_at=0 data.kwargs.wrong=raises", "Sample 0 raised ValueError: sample 0 is broken (user_code.py:"),
    ("data.target=user_code:Items data.kwargs.wrong_at=0 data.kwargs.wrong=text", "must have samples (input, target). The first one is a str. Try data.collate="),
    ("data.target=user_code:texts", "layer 0 (Linear) must take what the data gives."),
    ("data.target=user_code:sampled_data", "must leave the order of its samples to the runner. train_dataloader() draws them by a WeightedRandomSampler"),
    ("data.collate=user_code:collate_one", "data.collate = user_code:collate_one: must give a batch (input, target)"),
    ("data.collate=user_code:collate_short", "A batch of 24 samples has them on the first axis of every tensor: a tensor of shape (1, 6)."),
    ("data.collate=user_code:collate_raising", "data.collate = user_code:collate_raising: must have samples that make a batch."),
    # the loss
    ("loss.target=user_code:per_sample", "loss.target = shape (32,): must return a scalar mean over its samples, or (sum, weight)."),
    ("loss.target=user_code:loss_raising", "the loss must take what comes before it. Given (32, 5) float32, (32,) int64, it raised ValueError: the loss is broken."),
    ("loss=mse loss.target=runner.zoo.losses:mse", "loss = mse: the loss must take what comes before it. Given (32, 5) float32, (32,) int64, it raised ValueError: the target's shape (32,) must be that of the output, (32, 5)"),
    ("loss.target=user_code:loss_detached", "loss.target = no gradient: must be differentiable."),
    # the place, what is continued, what is called later
    ("run_dir={file}", "must be a directory. It is a file."),
    ("run_dir={file}/below", "must lie in a directory."),
    ("run_dir=/proc/nothing", "run_dir = /proc/nothing: must be writable."),
    ("resume={file}", "must be auto or a good checkpoint's file. It is damaged or cut short"),
    ("report=user_code:nope", "report = user_code:nope: must name a function of that module."),
]  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, a cache of this file's own, and the runner's logger as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUNNER_CACHE", str(cache))
    log = logging.getLogger("runner")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.level, log.propagate = handlers, level, propagate


@pytest.mark.costly
@pytest.mark.parametrize(("overrides", "told"), REQUESTS)
def test_it_is_refused_with_its_cause(
    overrides: str, told: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cache / "a_file"
    file.write_text("no checkpoint")
    status = main(["train", *BASE.split(), *overrides.format(file=file).split()])
    shown = capsys.readouterr()
    assert status == 2, shown.err
    assert told in shown.err
    assert "Traceback" not in shown.err + shown.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_what_does_not_fit_is_told_with_the_largest_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *BASE.split(), "memory_limit=1kB"]) == 3
    told = capsys.readouterr().err
    assert told.startswith("memory_limit = 1.00 kB: rank 0 (stage 0) needs")
    assert "The largest part is" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("model.kwargs.n_lyer=2", "GPT2Config has no n_lyer (did you mean n_layer?)"),
        ("model.kwargs.model_type=gtp2", "transformers has no model_type = gtp2 (did you mean gpt2?)"),
        ("model.kwargs.task=cusal", "task = cusal must be one of causal, masked"),
    ],
)
def test_a_wrong_model_of_transformers(overrides: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "model=huggingface", *overrides.split()]) == 2
    assert told in capsys.readouterr().err


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "runner.zoo.huggingface", raising=False)
    assert main(["train", "model=huggingface"]) == 2
    told = "needs transformers, which is not installed. Try pip install -e '.[huggingface]'."
    assert told in capsys.readouterr().err

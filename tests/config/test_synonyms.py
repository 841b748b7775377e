"""The words of other tools are answered with ours, and each answer is accepted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

from runner.config.compose.groups import config_roots, groups, options, shipped_conf
from runner.config.compose.overrides import read_overrides
from runner.config.compose.resolve import resolve
from runner.config.compose.shape import type_at
from runner.config.compose.synonyms import Synonym, synonyms
from runner.errors import RequestError

_SAMPLES: dict[Any, str] = {int: "2", float: "0.5", bool: "true", str: "some", Any: "2"}
TYPED = {
    # transformers' TrainingArguments
    "per_device_train_batch_size=8": "data.batch_size=8",
    "gradient_accumulation_steps=4": "schedule.microbatches=4",
    "learning_rate=0.5": "optimizer.lr=0.5",
    "num_train_epochs=3.0": "trainer.max_epochs=3",
    "max_grad_norm=1.0": "trainer.grad_clip_norm=1.0",
    "fp16=true": "precision=fp16_mixed",
    "bf16=true": "precision=bf16_mixed",
    "gradient_checkpointing=true": "activation_checkpoint=full",
    "lr_scheduler_type=cosine": "lr_scheduler=cosine",
    "optim=adamw_torch": "optimizer=adamw",
    "optim=adamw_bnb_8bit": "optimizer=adam8bit",
    "save_steps=100": "checkpoint.every=100",
    "eval_steps=50": "trainer.val_every=50",
    "save_total_limit=2": "checkpoint.keep=2",
    "warmup_steps=10": "lr_scheduler.warmup_steps=10",
    "resume_from_checkpoint=true": "resume=auto",
    "resume_from_checkpoint=a/b.ckpt": "resume=a/b.ckpt",
    "report_to=wandb": "logger=wandb",
    # Lightning's Trainer
    "trainer.accumulate_grad_batches=4": "schedule.microbatches=4",
    "gradient_clip_val=0.5": "trainer.grad_clip_norm=0.5",
    "precision=bf16-mixed": "precision=bf16_mixed",
    "precision=16": "precision=fp16_mixed",
    "trainer.precision=32-true": "precision=fp32",
    "strategy=ddp": "parallelism=data",
    "strategy=fsdp": "zero=3",
    "strategy=deepspeed_stage_2": "zero=2",
    "accelerator=gpu": "device=cuda",
    "devices=64": "parallelism.data=64",
    "num_nodes=2": "launcher.nodes=2",
    # accelerate, DeepSpeed
    "mixed_precision=bf16": "precision=bf16_mixed",
    "zero_optimization.stage=2": "zero.stage=2",
    "zero_optimization.offload_optimizer.device=cpu": "offload.optimizer=cpu",
    "train_micro_batch_size_per_gpu=4": "data.batch_size=4",
    "fp16.enabled=true": "precision=fp16",
    "optimizer.type=AdamW": "optimizer=adamw",
    "optimizer.params.lr=0.1": "optimizer.lr=0.1",
    "scheduler.params.warmup_num_steps=5": "lr_scheduler.warmup_steps=5",
    # torchtitan
    "training.steps=100": "trainer.max_steps=100",
    "training.max_norm=1.0": "trainer.grad_clip_norm=1.0",
    "parallelism.pipeline_parallel_degree=4": "parallelism.pipeline=4",
    "parallelism.tensor_parallel_degree=2": "parallelism.tensor=2",
    "parallelism.pipeline_parallel_schedule=Interleaved1F1B": "schedule=interleaved_1f1b",
    "activation_checkpoint.mode=selective": "activation_checkpoint=selective",
    "checkpoint.interval=10": "checkpoint.every=10",
    # axolotl
    "micro_batch_size=2": "data.batch_size=2",
    "sequence_len=512": "data.kwargs.length=512",
    "num_epochs=1.0": "trainer.max_epochs=1",
    "lora_r=8": "adapter.rank=8",
    # our own keys with other words
    "offload=cpu": "offload=optimizer_cpu",
    "activation_checkpoint=on": "activation_checkpoint=full",
    "activation_checkpoint=true": "activation_checkpoint=full",
}
WITHOUT = [
    "devices=auto",
    "num_train_epochs=2.5",
    "fp16=false",
    "strategy=horovod",
    "optim=lion_8bit",
    "trainer.min_epochs=3",
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _hints(word: str) -> list[str]:
    _, problems = read_overrides([word], config_roots(Path.cwd()))
    return [problem.fix for problem in problems]


@pytest.mark.parametrize("word", TYPED)
def test_a_word_of_another_tool_is_answered_with_ours(word: str) -> None:
    assert _hints(word) == [TYPED[word]]


@pytest.mark.parametrize("name", ["trainer.accumulate_grad_batches", "gradient_accumulation_steps"])
def test_accumulated_batches_keep_their_size(name: str) -> None:
    _, problems = read_overrides([f"{name}=2", "data.batch_size=8"], config_roots(Path.cwd()))
    assert [problem.fix for problem in problems] == ["schedule.microbatches=2 data.batch_size=16"]
    _, (problem,) = read_overrides([f"{name}=2"], config_roots(Path.cwd()))
    assert "data.batch_size has the samples of all of them, so multiply that too" in problem.line()


@pytest.mark.parametrize("word", WITHOUT)
def test_what_has_no_counterpart_has_no_hint(word: str) -> None:
    assert _hints(word) == [""]


def _values(synonym: Synonym) -> list[str]:
    """Values that stand for all with which the word may be typed."""
    if synonym.value is not None:
        return [synonym.value]
    if synonym.key in groups():
        return [*options(synonym.key, (shipped_conf(),))]
    kind = type_at(synonym.key)
    kinds = [kind] if get_origin(kind) is list else [kind, *get_args(kind)]  # one that may be null is a union
    return (
        ["[some]"] if any(get_origin(each) is list for each in kinds) else [_SAMPLES[k] for k in kinds if k in _SAMPLES]
    )


def _words(synonym: Synonym) -> list[str]:
    if synonym.is_value:
        return [f"{synonym.key}={synonym.name}"]
    return [f"{synonym.name}={value}" for value in _values(synonym)]


@pytest.mark.costly
def test_every_answer_is_accepted() -> None:
    """The key or the option exists, and takes the value."""
    answered = [each for each in synonyms() if not (each.is_value and each.key == "hardware")]  # whose names choose
    answers = {word: _hints(word) for synonym in answered for word in _words(synonym)}
    assert len(answers) > 200
    assert {word: hints for word, hints in answers.items() if len(hints) != 1 or not hints[0]} == {}
    told = {word: hints[0] for word, hints in answers.items()}
    assert {word: hint for word, hint in told.items() if _hints(hint)} == {}
    for hint in {hint.partition("=")[0]: hint for hint in told.values()}.values():
        resolve(["model=mlp", hint])


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("optimizer=adamv", "optimizer=adamw"),  # and not adam, which is as near
        ("precision=fp8", "precision=bf16_mixed"),
        ("precision=transformer-engine", "precision=bf16_mixed"),
        ("optimizer=nothing", ""),
    ],
)
def test_a_name_that_no_option_has_is_answered_with_the_nearest(word: str, fix: str) -> None:
    assert _hints(word) == [fix]


def test_every_word_has_one_meaning() -> None:
    counts = Counter((each.name.casefold(), each.value, each.is_value and each.key) for each in synonyms())
    assert [word for word, count in counts.items() if count > 1] == []


def test_a_folder_of_hugging_face_is_told_how_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    with pytest.raises(RequestError) as error:
        resolve(["model=llama"])
    assert [each.fix for each in error.value.problems] == ["model=huggingface model.pretrained=llama"]

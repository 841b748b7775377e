"""A callback that lets the model go on with prompts at every validation, in whatever layout it trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from runner.engine.window import StepBatch
from runner.printable import printable_line
from runner.strategy.pipeline import EngineStrategy

__all__ = ["SAMPLES_FILE", "Samples"]

logger = logging.getLogger(__name__)

SAMPLES_FILE = "samples.jsonl"
_ROOM = 16  # tokens of a prompt that stay where a row is too short for all


class Samples(Callback):
    """Writes the likeliest next tokens after each prompt, one forward of all ranks for each.

    Every forward has the length of a training row, because a traced model has no other: what follows a prompt is
    padding, which a causal model does not see.

    Args:
        prompts: texts, or lists of token ids.
        tokens: how many tokens follow a prompt at most; an end of the text ends them.
        tokenizer: a folder with a tokenizer's files; None: prompts are token ids, and so is what is written.
        length: positions of a row.
        layout: ``packed`` where inputs also have positions, as those of ``data=text`` have.

    Raises:
        ValueError: an argument is not as it must be.
    """

    def __init__(
        self,
        prompts: Sequence[str | Sequence[int]] = ("The",),
        tokens: int = 32,
        tokenizer: str | None = None,
        length: int | None = None,
        layout: str | None = None,
    ) -> None:
        if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
            raise ValueError(
                "prompts are texts, and there is no tokenizer: name its folder, or give lists of token ids, "
                "such as callbacks.samples.kwargs.prompts=[[1,2,3]]"
            )
        if not prompts or tokens < 1 or length is None or length < 2:
            raise ValueError("there must be a prompt, tokens of at least 1 and a length of at least 2")
        self._prompts, self._tokens, self._length, self._layout = list(prompts), tokens, length, layout
        self._folder = tokenizer
        self._loaded: Any = None  # a copy of this callback in another process loads its own

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Generate here, where the time of a validation is counted."""
        if trainer.sanity_checking:
            return
        most = max(self._length - self._tokens, min(_ROOM, self._length - 1))
        prompts = [self._ids(prompt)[-most:] for prompt in self._prompts]
        made = self._generated(trainer.strategy, pl_module, prompts)
        if trainer.is_global_zero:
            for prompt, ids in zip(self._prompts, made, strict=True):
                self._tell(Path(trainer.default_root_dir), trainer.global_step, prompt, ids)

    def _generated(self, strategy: Any, module: Any, prompts: list[list[int]]) -> list[list[int]]:
        """The tokens after each prompt; every rank must call it, and gets the same."""
        assert isinstance(strategy, EngineStrategy)
        rows, made = [list(prompt) for prompt in prompts], [list[int]() for _ in prompts]
        end = getattr(self._tokenizer, "eos_token_id", None)
        for _ in range(self._tokens):
            output = module.predict_step(self._batch(strategy, rows), 0)
            chosen = _likeliest(output, rows)
            chosen = next(each for each in strategy.all_gather_objects(chosen) if each is not None)
            for row, own, token in zip(rows, made, chosen, strict=True):
                if len(row) < self._length and own[-1:] != [end]:
                    row.append(token)
                    own.append(token)
            if all(len(row) >= self._length or own[-1:] == [end] for row, own in zip(rows, made, strict=True)):
                break
        return made

    def _batch(self, strategy: EngineStrategy, rows: list[list[int]]) -> StepBatch:
        ids = torch.zeros(len(rows), self._length, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
        positions = torch.arange(self._length).repeat(len(rows), 1)
        inputs: Any = {"input_ids": ids, "position_ids": positions} if self._layout == "packed" else ids
        held = strategy.stages
        if 0 not in held and strategy.plan.schedule.stages - 1 not in held:
            return StepBatch()  # it hears how many samples there are
        batch = StepBatch(inputs if 0 in held else None, None, len(rows))
        moved: StepBatch = strategy.batch_to_device(batch)
        return moved

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        ids = list(self._tokenizer(prompt)["input_ids"])
        return ids[:-1] if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id else ids

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None and self._folder is not None:
            from transformers import AutoTokenizer

            folder = str(Path(self._folder).expanduser())
            self._loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return self._loaded

    def _tell(self, run_dir: Path, step: int, prompt: Any, ids: list[int]) -> None:
        text = self._tokenizer.decode(ids, skip_special_tokens=True) if self._tokenizer is not None else ids
        logger.info("step %d  sample after %s: %s", step, printable_line(repr(prompt)), printable_line(repr(text)))
        with (run_dir / SAMPLES_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "prompt": prompt, "sample": text}) + "\n")


def _likeliest(output: Any, rows: list[list[int]]) -> list[int] | None:
    """The likeliest token after each row; None on a rank that has no outputs."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        return None
    return [int(logits[number, len(row) - 1].argmax()) for number, row in enumerate(rows)]

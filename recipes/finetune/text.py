"""A small Llama, trained on five languages, learns a sixth by LoRA, and goes back to transformers and to PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runner.recipes.finetune.commands import Trained, run, train
from runner.recipes.finetune.names import NEW, completion_of, held_out, names, prompt_of, write_files
from runner.recipes.schedules.tables import markdown_table

__all__ = ["WAYS", "generate", "markdown", "measure"]

_FILES = Path("outputs/finetune")  # conf/recipe/finetune_base.yaml and finetune_text.yaml name what is in it
_NAMES, _BASE, _MERGED, _ADAPTER = (_FILES / name for name in ("names", "base", "merged", "adapter"))
_COMPLETION = "data.kwargs.form=completion"  # of which all losses are that are compared
_ON_NEW = (
    f"data.kwargs.path={_NAMES}/new.jsonl",
    f"data.kwargs.validation={_NAMES}/new_held_out.jsonl",
    _COMPLETION,
)
_AS_LONG = ("trainer.max_steps=100", "trainer.val_every=100")  # as finetune_text.yaml
_LORA = "base, LoRA"
WAYS: Mapping[str, Sequence[str]] = {
    _LORA: ("recipe=finetune_text",),
    "base, all weights": ("recipe=finetune_text", "adapter=none", "adapter.targets=[]", "optimizer.lr=2e-3"),
    "random weights": ("recipe=finetune_base", *_ON_NEW, *_AS_LONG),
}
"""What each way to learn the new language is called, and the words of its request."""

_SOURCE = "en"  # the language that generated names are translated from
_SHOWN = 10
_LONGEST = 32  # tokens of a generated name


def measure(out: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Train the base and what starts from it, hand it back, and let it name the held-out emoji.

    Args:
        out: the folder of the runs.
        words: further overrides of every run.

    Returns:
        ``base``: the figures of the base's run; ``rows``: those of each way to learn the new language;
        ``names``: for each held-out emoji its prompt, its name, and what was generated before and after.
    """
    write_files(_NAMES)
    base = train(out / "text-base", "recipe=finetune_base", *words)
    _export(base, _BASE, "huggingface")
    own, before = _loss_of(base, _COMPLETION), _loss_of(base, *_ON_NEW)
    ways = {
        name: train(out / f"text-{number}", *request, *words) for number, (name, request) in enumerate(WAYS.items())
    }
    _export(ways[_LORA], _MERGED, "huggingface")
    _export(ways[_LORA], _ADAPTER, "peft")
    count = _elements(_BASE)
    rows = {"base, as it is": {"trained": 0, "steps": 0, "loss": before}}
    for name, trained in ways.items():
        rows[name] = _figures(trained, _elements(_ADAPTER) if name == _LORA else count)
    return {"base": _figures(base, count) | {"loss": own}, "rows": rows, "names": _named()}


def _loss_of(trained: Trained, *words: str) -> float:
    """The loss of a run's weights on the held-out data of a changed request."""
    loss: float = json.loads(run("evaluate", trained.run_dir, *words, "--json"))["val_loss"]
    return loss


def _export(trained: Trained, folder: Path, form: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    run("export", trained.run_dir, folder, "--format", form)


def _elements(folder: Path) -> int:
    """The number of weights in a folder's safetensors files."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            count += sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118 - it is no mapping
    return count


def _figures(trained: Trained, count: int) -> dict[str, Any]:
    record = trained.record
    return {
        "trained": count,
        "steps": record["steps"],
        "loss": record["val_loss"][-1][1],
        "seconds": trained.seconds,
    }


def _named() -> list[dict[str, str]]:
    """The held-out emoji in the new language, as the base and the fine-tuned model name them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    every = names()
    held = {symbol: every[symbol] for symbol in sorted(held_out(every))}
    prompts = [prompt_of(named, _SOURCE, NEW) for named in held.values()]
    base, merged = (AutoModelForCausalLM.from_pretrained(folder) for folder in (_BASE, _MERGED))
    before, after = generate(base, _BASE, prompts), generate(merged, _MERGED, prompts)
    adapted = generate(PeftModel.from_pretrained(base, str(_ADAPTER)), _BASE, prompts)
    found = []
    for place, (symbol, named) in enumerate(held.items()):
        told = {"emoji": symbol, "source": named[_SOURCE], "name": completion_of(named, NEW).strip()}
        found.append({**told, "before": before[place], "after": after[place], "by_peft": adapted[place]})
    return found


@torch.no_grad()
def generate(model: Any, folder: Path, prompts: Sequence[str]) -> list[str]:
    """What a model writes after each prompt, its likeliest token first, until it ends the text.

    Args:
        model: a causal model of transformers.
        folder: its tokenizer's folder.
        prompts: they are read at once, padded at their beginnings.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    given = tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False)
    made = model.eval().generate(
        **given, max_new_tokens=_LONGEST, do_sample=False, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    written = made[:, given["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]


def markdown(document: Mapping[str, Any]) -> str:
    """The tables of losses and of generated names."""
    base, named = document["base"], document["names"]
    told = (
        f"The base has {base['trained']:,} weights; {base['steps']} steps took {base['seconds']:.0f} s, and its loss "
        f"on held-out names of its own languages is {base['loss']:.3f}."
    )
    return "\n\n".join([told, _losses(document["rows"]), _counts(named), _samples(named)])


def _losses(rows: Mapping[str, Mapping[str, Any]]) -> str:
    cells = [
        [name, f"{row['trained']:,}", str(row["steps"]), f"{row['loss']:.3f}", _seconds(row)]
        for name, row in rows.items()
    ]
    return markdown_table(["starts from", "weights trained", "steps", "loss on held-out names", "command"], cells)


def _seconds(row: Mapping[str, Any]) -> str:
    return f"{row['seconds']:.0f} s" if "seconds" in row else ""


def _counts(named: Sequence[Mapping[str, str]]) -> str:
    before, after = (sum(each[key] == each["name"] for each in named) for key in ("before", "after"))
    same = sum(each["after"] == each["by_peft"] for each in named)
    return (
        f"Of {len(named)} held-out names, {before} are spelled exactly before and {after} after. "
        f"PEFT's folder on the base writes the same as the merged folder for {same} of them."
    )


def _samples(named: Sequence[Mapping[str, str]]) -> str:
    shown = named[:: max(1, len(named) // _SHOWN)][:_SHOWN]
    cells = [[_cell(each[key]) for key in ("emoji", "source", "before", "after", "name")] for each in shown]
    return markdown_table(["emoji", "prompt", "before", "after", "Unicode's name"], cells)


def _cell(text: str) -> str:
    """A text that breaks no table."""
    return " ".join(text.replace("|", "\\|").split())

"""A folder whose configuration ties two weights, and whose files hold both: transformers trains both, and so do we."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from requests_in_threads import in_plain_pytorch, trained
from safetensors.torch import load_file, save_file
from torch import nn

from runner.config.compose.resolve import resolve, to_container
from runner.model.check_pretrained import pretrained_problems
from runner.record import RunRecord
from runner.training.export_folders import write_pretrained

TOKENS, LENGTH, BATCH, STEPS = 24, 6, 8, 3
SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
Tokens = tuple[torch.Tensor, torch.Tensor]


def folder_of(place: Path, config: Any, kind: Any, **state: torch.Tensor) -> Path:
    """A folder of a model that ties nothing, whose configuration says that it does; ``state`` replaces tensors."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(3)
    kind(config).save_pretrained(place)
    written = json.loads((place / "config.json").read_text()) | {"tie_word_embeddings": True}
    (place / "config.json").write_text(json.dumps(written))
    save_file(load_file(place / "model.safetensors") | state, place / "model.safetensors", {"format": "pt"})
    return place


def llama(place: Path) -> Path:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    return folder_of(place, config, transformers.LlamaForCausalLM)


def rows(samples: int = BATCH * STEPS) -> Tokens:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(0, TOKENS, (samples, LENGTH), generator=generator),
        torch.randint(0, TOKENS, (samples, LENGTH), generator=generator),
    )


def data() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(*rows())


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def plain(model: nn.Module) -> list[float]:
    """The losses of transformers' own model over whole batches; the model is trained in place."""
    given = zip(*(torch.split(part, BATCH) for part in rows()), strict=True)
    return in_plain_pytorch(model, lambda output, target: cross_entropy(output.logits, target), given)


def request(folder: Path | str, data: str = "data") -> list[str]:
    """What a user asks for, who names the folder."""
    return [
        "model=huggingface", f"model.pretrained={folder}", f"data.target=test_two_of_one_weight:{data}",
        "loss.target=test_two_of_one_weight:cross_entropy", f"data.batch_size={BATCH}",
    ]  # fmt: skip


def check(
    found: tuple[list[float], dict[str, torch.Tensor]], losses: list[float], state: dict[str, torch.Tensor]
) -> None:
    assert found[0] == pytest.approx(losses, rel=2e-6)
    assert set(found[1]) == set(state)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=2e-5, atol=1e-6, msg=name)


@pytest.mark.costly
@pytest.mark.parametrize("pipeline", [1, 2])
def test_both_are_trained_and_saved(tmp_path: Path, pipeline: int) -> None:
    """As from_pretrained opens the folder; what is exported opens as the same model again."""
    folder = llama(tmp_path / "folder")
    found = trained(request(folder), pipeline=pipeline, microbatches=2, steps=STEPS)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check(found, plain(model), model.state_dict())
    RunRecord(config=to_container(resolve(request(folder)))).save(tmp_path)
    for source in ("as it was", "without its weights"):
        if source != "as it was":
            (folder / "model.safetensors").unlink()
        out = tmp_path / source
        write_pretrained(found[1], out, tmp_path, "1GB")
        opened = transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
        assert [name for name, value in found[1].items() if not torch.equal(opened[name], value)] == []


def test_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A configuration that says something else than the files is not followed without a word."""
    config = resolve(request(llama(tmp_path)))
    with caplog.at_level(logging.WARNING):
        assert pretrained_problems(config) == []
    assert [line for line in caplog.messages if line.startswith("lm_head.weight is trained as a weight of its own")]


def test_two_equal_ones_and_one_of_two_are_tied(tmp_path: Path) -> None:
    """What transformers ties stays tied: equal tensors, and one that the files hold under its other name."""
    folder = llama(tmp_path)
    held = load_file(folder / "model.safetensors")
    equal = held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}
    one = {name: value for name, value in held.items() if name != "model.embed_tokens.weight"}
    for tensors in (equal, one):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        check(trained(request(folder), pipeline=1, microbatches=2, steps=1), plain(model)[:1], {**_after_one(folder)})


def _after_one(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs, targets = (part[:BATCH] for part in rows())
    cross_entropy(model(inputs).logits, targets).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return dict(model.state_dict())


class Tied(nn.Sequential):
    """A user's own model, which cannot give up its tie."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS, bias=False))
        self[1].weight = self[0].weight


Tied.forward = nn.Sequential.forward  # type: ignore[method-assign]  # the runner looks whose it is


def own() -> nn.Sequential:
    return Tied()


def test_another_model_refuses_two(tmp_path: Path) -> None:
    """A model of the user's own that ties its weights takes one tensor, and says which two there are."""
    file = tmp_path / "mine.safetensors"
    table = torch.randn(TOKENS, 16)
    words = ["model.target=test_two_of_one_weight:own", f"model.pretrained={file}", *request("")[2:]]
    save_file({"0.weight": table, "1.weight": table.clone()}, file)
    assert pretrained_problems(resolve(words)) == []
    save_file({"0.weight": table, "1.weight": table + 1}, file)
    (line,) = (problem.line() for problem in pretrained_problems(resolve(words)))
    assert "must hold one tensor for 0.weight and 1.weight. The model ties them, and theirs differ" in line
    names = tmp_path / "names.yaml"
    names.write_text("1.weight: null\n")
    assert pretrained_problems(resolve([*words, f"model.pretrained_names={names}"])) == []

"""A model of transformers that a user's function makes, as it is, with a loss of its whole output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from requests_in_threads import batches, in_plain_pytorch, trained
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import prepare

TOKENS, LENGTH, BATCH, STEPS = 31, 6, 4, 2
SIZES: dict[str, Any] = {"vocab_size": TOKENS, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16}
HERE = "test_own_models_of_transformers"
WORDS = [f"model.target={HERE}:build", f"data.target={HERE}:data", f"loss.target={HERE}:loss", "data.batch_size=4"]


def build(kind: str) -> Any:
    """Keys and values of earlier tokens are returned, too, unless somebody asks for none."""
    made: Any = transformers.AutoModelForCausalLM
    return made.from_config(transformers.AutoConfig.for_model(kind, **SIZES, intermediate_size=24))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(TOKENS, (BATCH * STEPS, LENGTH), generator=torch.Generator().manual_seed(7))
    return [(row, row) for row in tokens]


def loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.costly
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_it_trains(kind: str, pipeline: int) -> None:
    words = [*WORDS, f"model.kwargs.kind={kind}"]
    losses, _ = trained(words, pipeline=pipeline, microbatches=2, steps=STEPS)
    torch.manual_seed(resolve(words).seed)
    assert losses == pytest.approx(in_plain_pytorch(build(kind).train(), loss, batches(words, STEPS)), rel=2e-6)


@pytest.mark.costly
def test_stages_end_where_every_rank_has_the_whole_value() -> None:
    """The plan of transformers divides its modules; the trace that is cut must not end between two of their maps."""
    divided = ("parallelism.pipeline=2", "parallelism.tensor=2", "schedule.microbatches=2", "device=cpu")
    plan = prepare(resolve([*WORDS, "model.kwargs.kind=llama", *divided, "hardware=laptop_cpu"]), place_is_made=True)
    assert plan.problems == ()
    assert plan.profile.parameters_elsewhere > 0.4 * plan.profile.num_parameters

"""``auto`` offers graph programs where skips pass layers by, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from runner.memory.solve.choose import Priced, priced
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.values import StageChain
from runner.model.layers import layers_of
from runner.plan.choices import program_cost
from runner.profiling.model import profile_layers
from runner.recipes.rematerialization.models import MODELS
from runner.recipes.rematerialization.paced import with_flops_as_seconds

GRAPHS = {"dtr full", "kusumoto approximate"}


def chain_of(make: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor, loss: object) -> StageChain:
    torch.manual_seed(0)
    profile = profile_layers(layers_of(make(), 0), inputs, targets, loss, torch.float32)  # type: ignore[arg-type]
    profile = with_flops_as_seconds(profile, 1.0)
    return StageChain(profile, 0, len(profile.layers) - 1, may_run_graphs=True)


def of_recipe(name: str) -> StageChain:
    task = MODELS[name]()
    return chain_of(task.build, *task.batch, task.loss)


def offers(chain: StageChain, name: str = "auto", **options: object) -> tuple[Priced, ...]:
    candidates = STRATEGIES[name].candidates
    assert candidates is not None
    chain = replace(chain, options=options)
    return priced(candidates(chain), lambda program: program_cost(chain, program))


def seconds_within(found: tuple[Priced, ...], budget: int) -> float:
    return min((each.offer.seconds for each in found if each.offer.peak_bytes <= budget), default=float("inf"))


def test_a_u_net_is_never_slower_than_with_chains_or_graphs_alone() -> None:
    chain = of_recipe("U-Net")
    both, chains = offers(chain), offers(replace(chain, may_run_graphs=False))
    graphs = [offers(chain, "dtr"), offers(chain, "kusumoto", approximate=True)]
    assert {each.offer.name for each in both} >= GRAPHS
    assert not {each.offer.name for each in chains} & GRAPHS
    most = max(each.offer.peak_bytes for each in both)
    gained = 0
    for part in range(20, 0, -1):
        found = [seconds_within(each, most * part // 20) for each in (both, chains, *graphs)]
        assert found[0] == min(found[1:])
        gained += found[0] < found[1]
    assert gained >= 3


def test_a_chain_without_skips_has_no_graphs() -> None:
    assert not {each.offer.name for each in offers(of_recipe("GPT"))} & GRAPHS

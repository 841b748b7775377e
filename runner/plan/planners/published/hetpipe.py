"""``planner=hetpipe``: workers that are pipelines with N_m micro-batches under way; the slowest stage is the least.

For every size of a worker and every N_m, the cut whose slowest stage takes least among those in which each stage fits
what it holds: at most as many micro-batches as pass between its forward and its backward. The paper's linear program
over 0 and 1 has the same solutions; on a chain a dynamic program is exact. A worker's micro-batch takes the slowest
stage, or the way through all stages over N_m. A step pushes and pulls the weights of each stage once (distance 0).
Unlike devices are grouped into workers in the paper's three ways, of which the fastest is taken.

Source: Park et al. 2020, HetPipe, as the surveys tell it (reconstruction).
"""

from __future__ import annotations

from runner.plan.planners.kinds import CUTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, divisors, with_microbatches
from runner.plan.planners.published.grouping import Grouped, exchange, grouped, groupings, least_slowest, way
from runner.plan.planners.values import Device, PlanningAnswer, PlanningProblem

__all__ = ["PLANNER", "compared", "plan", "worker"]


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan_unlike if problem.devices else _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    best: tuple[float, Stages, int] | None = None
    for size in divisors(problem.ranks):
        workers = problem.ranks // size
        if size > len(problem.layers) or count % workers:
            continue
        for under_way in range(1, min(2 * size - 1, count // workers) + 1):
            found = worker(chain, size, under_way)
            if found is None:
                break  # more micro-batches need more memory
            slowest, stages = found
            through = way(chain, stages, _alike(problem, size))
            step = count // workers * max(slowest, through / under_way) + exchange(chain, stages, workers)
            best = min(best, (step, stages, workers)) if best is not None else (step, stages, workers)
    if best is None:
        return None
    seconds, stages, workers = best
    return answer_of(
        "hetpipe",
        problem,
        stages,
        replicas=(workers,) * len(stages),
        tensor=(1,) * len(stages),
        microbatches=count // workers,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=seconds,
    )


def _alike(problem: PlanningProblem, size: int) -> tuple[Device, ...]:
    return (Device("", 1.0, problem.memory[problem.ranks]),) * size


def worker(chain: Chain, size: int, under_way: int) -> tuple[float, Stages] | None:
    """The least slowest stage, with its messages, of a worker with so many devices and micro-batches under way."""
    return least_slowest(chain, _alike(chain.problem, size), under_way)


def compared(problem: PlanningProblem, count: int) -> dict[str, Grouped]:
    """What a step of ``count`` micro-batches takes with each grouping of unlike devices that fits: the best by name."""
    chain, found = Chain(problem, problem.divisions[0], problem.batch / count), dict[str, Grouped]()
    for name, workers in groupings(problem.devices):
        made = grouped(chain, workers, count) if count % len(workers) == 0 else None
        if made is not None and (name not in found or made.seconds < found[name].seconds):
            found[name] = made
    return found


def _plan_unlike(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    """The fastest grouping of unlike devices; the engine runs the one whose workers are alike."""
    found = compared(problem, count)
    if not found:
        return None
    name = min(found, key=lambda each: (found[each].seconds, not found[each].alike))
    best = found[name]
    needs: tuple[str, ...] = ()
    if not best.alike:
        others = "".join(
            f"; {each} takes {other.seconds / best.seconds:.2f} times as long"
            for each, other in found.items()
            if each != name
        )
        needs = (
            f"its workers ({name}) have unlike devices, and replicas of a stage have devices of one class{others}",
        )
    return answer_of(
        "hetpipe",
        problem,
        best.stages,
        replicas=(best.workers,) * len(best.stages),
        tensor=(1,) * len(best.stages),
        microbatches=count // best.workers,
        kept=(problem.divisions[0].kept[0].name,) * len(best.stages),
        seconds=best.seconds,
        needs=needs,
        devices=tuple(device.name for device in best.devices),
    )


PLANNER = PlannerKind(
    name="hetpipe",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
    ),
    chooses="cut, workers, micro-batches under way",
    by="dynamic program, the least slowest stage that fits",
    lacks="filling the pipeline, recomputation",
    position=90,
)

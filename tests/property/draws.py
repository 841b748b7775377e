"""Draws whole requests from what the kinds of options say of themselves: catalogues, their legal values, option files.

A request is the words that one would type. Most that are drawn are legal; the rules refuse the others, and must do so
with a problem. A guest that is new in a catalogue is drawn without a line here.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec as find_package
from pathlib import Path

from property_models import KINDS

import runner
from runner.config.rules.tensor import OF_PARTS
from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.strategies import STRATEGIES
from runner.memory.solve.weights import WEIGHT_STRATEGIES
from runner.optim.catalogue.registry import COMPRESSORS, OPTIMIZERS, PREDICTIONS
from runner.schedule.catalogue.registry import SPECS, ScheduleRequest, ScheduleSpec, generate, request_problems

STEPS = 3
MOST_STAGES, MOST_RANKS = 8, 12
_CONF = Path(runner.__file__).parent / "conf"
_MODULE = "property_models"
Words = dict[str, str]


@dataclass(frozen=True)
class Drawn:
    """A drawn request.

    Args:
        words: override to value, in the order in which one would type them.
        resumed: what changes where a second run continues from the checkpoint of step ``saved``; None: nothing is
            resumed.
        saved: the number of steps after which the first run is saved, again and again.
        limit: the memory that a rank may use, as a share of what it would use without a limit; None: no limit.
        rehearses: whether ranks measure their stages first, as the command lets them.
    """

    words: Words
    resumed: Words | None = None
    saved: int = STEPS
    limit: float | None = None
    rehearses: bool = False

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.words.items()]

    def line(self, command: str = "verify") -> str:
        """What one types to see it, in the clone."""
        shown = " ".join(f"'{each}'" if set(each) & set("[]{} ") else each for each in self.overrides)
        steps = f" --steps {STEPS}" if command == "verify" else ""
        return f"PYTHONPATH=tests/property runner {command} {shown}{steps}"


@dataclass(frozen=True)
class Reach:
    """How far draws go.

    Args:
        searching: whether strategies are among them that search for seconds to minutes.
        steady: whether most draws stay what they were when a guest comes to a catalogue.
    """

    searching: bool = False
    steady: bool = False


_NEAR = Reach()


@dataclass
class _Draw:
    rng: random.Random
    reach: Reach
    words: Words = field(default_factory=dict)

    def often(self, share: float) -> bool:
        return self.rng.random() < share

    def of(self, values: Iterable[object]) -> str:
        """One of the values."""
        if not self.reach.steady:
            return str(self.rng.choice(list(values)))
        token = self.rng.random()
        return max(map(str, values), key=lambda value: zlib.crc32(f"{token} {value}".encode()))

    def examples(self, section: str, examples: Mapping[str, Sequence[object]], share: float = 0.7) -> None:
        for key, values in examples.items():
            if self.often(share):
                self.words[f"{section}.{key}"] = self.of(values)


def draw(seed: str, reach: Reach = _NEAR) -> Drawn:
    """The request of a seed."""
    rng = random.Random(seed)
    drawn = _Draw(rng, reach)
    stages, one_way = _layout(drawn)
    _model(drawn, stages, one_way=one_way)
    _batch(drawn)
    rare = 0.4 if SPECS[drawn.words["schedule"]].kind == "asynchronous" else 0.8  # much is refused beside late weights
    for share, add in _PARTS:
        if drawn.often(share * rare):
            add(drawn)
    made = Drawn(drawn.words, limit=rng.choice((0.6, 0.8, 1.1)) if rng.random() < 0.25 else None)
    if rng.random() < 0.6:
        made = replace(made, resumed=_other_layout(drawn), saved=rng.randrange(1, STEPS))
    return _divided(drawn, replace(made, rehearses=rng.random() < 0.05))


def _layout(drawn: _Draw) -> tuple[int, bool]:
    """Draw degrees and a schedule, of those that the catalogue allows.

    Returns:
        the number of stages, and whether all micro-batches go through the ranks in one way.
    """
    rng = drawn.rng
    while True:
        spec = SPECS[drawn.of(name for name in SPECS if name != "from_file")]
        asked = _schedule(drawn, spec)
        stages = asked.ranks * (asked.chunks or spec.default_chunks or 1)
        if stages <= MOST_STAGES and not request_problems(spec.name, asked):
            break
    keys = {**asked.options, "chunks": asked.chunks}
    drawn.words |= {"schedule": spec.name, "parallelism.pipeline": str(asked.ranks)}
    drawn.words["parallelism.data"] = rng.choice("1112223" if asked.ranks < 4 else "1112")
    drawn.words["schedule.microbatches"] = str(asked.microbatches)
    drawn.words |= {f"schedule.{key}": str(value) for key, value in keys.items() if value is not None}
    if drawn.often(0.2 if spec.kind == "synchronous" else 0.02):
        drawn.words["schedule.post_validation"] = "true"
    order = generate(spec.name, asked)
    if order.filling is not None and drawn.often(0.9):  # its work is that of one optimizer
        drawn.words["optimizer"] = drawn.of([name for name, kind in OPTIMIZERS.items() if kind.fills is not None])
        drawn.words["parallelism.data"] = "1"
    return stages, len(order.placement) == 1


def _schedule(drawn: _Draw, spec: ScheduleSpec) -> ScheduleRequest:
    rng = drawn.rng
    ranks = _ranks(rng, spec)
    legal = [each for each in range(1, 9) if spec.microbatches.holds(ranks, each)]
    chunks = rng.choice([each for each in (1, 2, 3, 4) if spec.chunks.holds(ranks, each)] or [None])
    drawable = [option for option in spec.options if option.legal]
    own = {option.key: rng.choice(list(option.legal)) for option in drawable if drawn.often(0.5)}
    given = chunks if spec.default_chunks is not None and chunks != spec.default_chunks else None
    return ScheduleRequest(ranks, rng.choice(legal or [2 * ranks]), chunks=given, options=own)


def _ranks(rng: random.Random, spec: ScheduleSpec) -> int:
    fewest = 1 if spec.one_rank else 2
    return rng.choice([each for each in (1, 2, 2, 3, 4) if each >= fewest and spec.ranks.holds(each, each)] or [fewest])


def _model(drawn: _Draw, stages: int, *, one_way: bool) -> None:
    rng, words = drawn.rng, drawn.words
    kind = drawn.of([name for name, each in KINDS.items() if each.by_sample or one_way or drawn.often(0.1)])
    words["model.target"] = f"{_MODULE}:build"
    words["model.kwargs.kind"] = kind
    if stages > 4:
        words["model.kwargs.layers"] = "8"
    if rng.random() < 0.5:
        words["model.kwargs.dropout"] = "0.25"
    words["data.target"] = f"{_MODULE}:samples"
    words["data.kwargs.kind"] = kind
    words["loss.target"] = f"{_MODULE}:{KINDS[kind].loss}"


def _batch(drawn: _Draw) -> None:
    """A batch whose largest micro-batch has one sample or eight: models are profiled for few sizes."""
    parts = int(drawn.words["parallelism.data"]) * int(drawn.words["schedule.microbatches"])
    size, replicas = drawn.rng.choice((1, 8, 8)), int(drawn.words["parallelism.data"])
    least = (size - 1) * parts + 1 if size > 1 else max(replicas, parts // 2)
    drawn.words["data.batch_size"] = str(drawn.rng.choice((size * parts, drawn.rng.randint(least, size * parts))))


_SOLVED = frozenset({"checkmate", "monet"})
"""Their integer programs take seconds for each request; without them, the requests of the corpus stay as they are."""


def _checkpointed(drawn: _Draw) -> None:
    names = [
        name
        for name, each in STRATEGIES.items()
        if not each.compiles and (drawn.reach.searching or name not in _SOLVED and not each.searches) and name != "none"
    ]
    strategy = STRATEGIES[drawn.of(names)]
    drawn.words["activation_checkpoint"] = strategy.name
    for option in strategy.options:
        if option.required or drawn.often(0.3):
            drawn.words[f"activation_checkpoint.{option.key}"] = option.example


def _offloaded(drawn: _Draw) -> None:
    if "activation_checkpoint" in drawn.words and drawn.often(0.7):  # most decide for both
        return
    searching = drawn.reach.searching
    names = [f"activations_{name}" for name, each in OFFLOADS.items() if searching or not each.searches]
    names += [f"weights_{name}" for name in WEIGHT_STRATEGIES]
    name = drawn.of([each for each in names if (_CONF / "offload" / f"{each}.yaml").exists()])
    drawn.words["offload"] = name
    if OFFLOADS.get(name.removeprefix("activations_")) is not None and drawn.often(0.2):
        drawn.words["offload.scope"] = drawn.of(("weights", "all"))
    if name.startswith("weights_") and drawn.often(0.3):
        drawn.words["offload.frozen_only"] = "true"


def _optimized(drawn: _Draw) -> None:
    if "optimizer" in drawn.words:
        return
    kinds = [kind for kind in OPTIMIZERS.values() if kind.operator is None and kind.name not in ("custom", "auto")]
    found = [each.name for each in kinds if each.package is None or find_package(each.package)]
    kind = OPTIMIZERS[drawn.of(found)]
    drawn.words["optimizer"] = kind.name
    drawn.examples("optimizer", kind.examples, share=1.0)
    if "momentum" in kind.reads and drawn.often(0.5):
        drawn.words["optimizer.momentum"] = "0.9"
    if drawn.often(0.5):
        drawn.words["optimizer.weight_decay"] = "0.1"


def _compressed(drawn: _Draw) -> None:
    if drawn.words["parallelism.data"] == "1" and drawn.often(0.95):  # a rule refuses it, which is drawn now and then
        return
    kind = COMPRESSORS[drawn.of([name for name in COMPRESSORS if name not in ("none", "custom")])]
    drawn.words["compression"] = kind.name
    drawn.examples("compression", {kind.place_of(key): values for key, values in kind.examples.items()})
    if drawn.often(0.3):
        drawn.words["compression.start_step"] = "1"
    if drawn.often(0.3):
        drawn.words["compression.error_feedback"] = drawn.of(("true", "false"))


def option_of(group: str, *others: str) -> tuple[str, ...]:
    return tuple(sorted({path.stem for path in (_CONF / group).glob("*.yaml")} - {"none", "custom", *others}))


def _precise(drawn: _Draw) -> None:
    if drawn.words.get("optimizer") == "kfac" and drawn.often(0.9):
        return
    drawn.words["precision"] = drawn.of(option_of("precision", "fp32", "fp64"))


def _scheduled(drawn: _Draw) -> None:
    drawn.words["lr_scheduler"] = drawn.of(option_of("lr_scheduler", "constant"))
    drawn.words["lr_scheduler.warmup_steps"] = drawn.of((0, 2))
    drawn.words["lr_scheduler.min_lr"] = drawn.of((0.0, 0.0001))


def _clipped(drawn: _Draw) -> None:
    if SPECS[drawn.words["schedule"]].kind == "asynchronous" and drawn.often(0.9):
        return
    drawn.words[f"trainer.grad_clip_{drawn.of(('norm', 'value'))}"] = drawn.of((0.05, 0.5))


def _frozen(drawn: _Draw) -> None:
    drawn.words["trainer.freeze"] = drawn.of(("[0.*]", "[*bias]", "[1.*]", "[*norm*]"))


def _shared(drawn: _Draw) -> None:
    kind = OPTIMIZERS.get(drawn.words.get("optimizer", "auto"))
    if kind is not None and (kind.by_weight or drawn.often(0.1)):
        drawn.words["zero.stage"] = "1"


def _cut(drawn: _Draw) -> None:
    drawn.words["partition"] = drawn.of(option_of("partition", "manual"))


def _approximated(drawn: _Draw) -> None:
    drawn.words["approximate_backward"] = drawn.of(option_of("approximate_backward"))


def _predicted(drawn: _Draw) -> None:
    kind = PREDICTIONS[drawn.of(option_of("weight_prediction"))]
    fitting = [name for name, each in OPTIMIZERS.items() if each.motion is not None and each.operator is None]
    drawn.words.setdefault("optimizer", drawn.of(fitting))
    drawn.words["weight_prediction"] = kind.name


def _averaged(drawn: _Draw) -> None:
    drawn.words["trainer.ema_decay"] = "0.9"


_PARTS = (
    (0.4, _checkpointed),
    (0.25, _offloaded),
    (0.45, _optimized),
    (0.15, _compressed),
    (0.25, _precise),
    (0.25, _scheduled),
    (0.25, _clipped),
    (0.2, _frozen),
    (0.12, _shared),
    (0.2, _cut),
    (0.05, _approximated),
    (0.05, _predicted),
    (0.05, _averaged),
)
"""How often a request has each part."""


def _divided(drawn: _Draw, made: Drawn) -> Drawn:
    """The request with layers that two ranks divide, in every second one that could have them; resumed with or without.

    Between these layers, each of the ranks has all tokens, or its own.

    It is drawn last, so that other requests are what they were before there were such ranks.
    """
    words, kind = drawn.words, OPTIMIZERS[drawn.words.get("optimizer", "auto")]
    ranks = int(words["parallelism.pipeline"]) * int(words["parallelism.data"])
    fits = KINDS[words["model.kwargs.kind"]].divides and kind.name in OF_PARTS
    if ranks > MOST_RANKS // 2 or not drawn.often(0.5 if fits else 0.02):
        return made
    words |= (parts := _parts(drawn))
    if made.resumed and drawn.often(0.5):
        return replace(made, resumed=made.resumed | (parts if drawn.often(0.5) else _parts(drawn)))
    return made


def _parts(drawn: _Draw) -> Words:
    return {"parallelism.tensor": "2"} | ({"parallelism.sequence": "true"} if drawn.often(0.4) else {})


def _other_layout(drawn: _Draw) -> Words:
    """Another layout in which the same training goes on: degrees, order and what is kept where."""
    words = drawn.words
    other = _Draw(drawn.rng, drawn.reach)
    stages, _ = _layout(other)
    if stages > 4 and words.get("model.kwargs.layers") != "8":
        return {}
    kept = {key: value for key, value in words.items() if key.startswith(("model", "data", "loss", "optim", "lr_"))}
    kept |= {key: value for key, value in words.items() if key.startswith(("precision", "trainer", "approx"))}
    if SPECS[words["schedule"]].kind == "asynchronous" or SPECS[other.words["schedule"]].kind == "asynchronous":
        return {}
    return {**other.words, **kept}

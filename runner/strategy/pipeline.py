"""The pipeline engine as a Lightning strategy; one stage (`single`, `data`) is its smallest case.

Lightning keeps its automatic optimization: ``training_step`` hands the batch over, the closure's ``zero_grad`` and
``backward`` do nothing, and :meth:`EngineStrategy.optimizer_step` runs the engine. ``global_step``, schedulers and
callbacks therefore work as in Lightning itself.

No collective over all ranks runs within a step. Two of Lightning's are replaced: its broadcast before every batch, and
the one in its SIGTERM handler.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from runner.checkpoint.state import extra_state_problems
from runner.engine.engine import Engine, EngineOptions, FinishedStep
from runner.engine.memory_meter import MemoryMeter
from runner.engine.rank_view import RankView
from runner.engine.transport.base import Transport
from runner.engine.transport.processes import destroy_process_groups
from runner.engine.transport.tensor_group import TensorGroup
from runner.engine.update.copies import running_statistics_problems
from runner.engine.update.gradients import StageGradients
from runner.engine.update.reducer import Reducer
from runner.engine.update.replicas import ReplicaExchange
from runner.engine.update.sharding import Sharding
from runner.engine.window import StepBatch
from runner.engine.work import Filler
from runner.engine.works.watch import watch_of
from runner.errors import Problem, RequestError, raise_problems
from runner.memory.apply.install import install
from runner.memory.apply.weight_swap import is_at_home
from runner.model.compiled import compile_layers
from runner.model.device import backend_of, device_of
from runner.model.layers import StageModule
from runner.model.precision import cast_module
from runner.model.seeds import mix_seed, seed_generators
from runner.model.sharded.values import Shard
from runner.model.tags import ParameterTag, named_parameters, tags_of
from runner.model.ties import crossing_ties
from runner.optim.forecast import Forecast
from runner.optim.learning_rate import scaled_rates
from runner.optim.states.backup import OptimizerBackup
from runner.optim.states.elastic import ElasticAverage
from runner.optim.states.master import MasterWeights
from runner.schedule.generators.one_directional.forward_only import forward_only
from runner.schedule.lowering.program import lower
from runner.strategy.checkpoints_by_name import NamedCheckpointStrategy, num_bytes
from runner.strategy.compressed import attach_compression
from runner.strategy.held_bytes import held_bytes, unwrapped
from runner.strategy.migration import (
    Belongings,
    emptied,
    layers_in,
    moves_between,
    receive_layer,
    require_movable,
    send_layer,
    tensors_of,
)
from runner.strategy.offload import make_offload, swap_weights
from runner.strategy.own_clipping import refusing_norms_of_a_part
from runner.strategy.protocols import Layout, PipelineModule
from runner.strategy.transports import make_transport

__all__ = ["Layout", "PipelineModule", "EngineStrategy"]

logger = logging.getLogger(__name__)


class EngineStrategy(NamedCheckpointStrategy):
    """Runs a :class:`PipelineModule` according to a plan.

    Args:
        plan: says which rank computes what; a :class:`runner.plan.values.RunPlan`, or its part without predictions.
        options: the engine's options, which are constant during the run.
        device: ``cpu`` or ``cuda``; on CUDA each rank takes the device of its local rank, see :func:`device_of`.
        timeout_seconds: longest wait for a message.
        reducer: makes what sums one stage's gradients over its replicas; None: they are summed as they are.
    """

    strategy_name = "runner_pipeline"

    def __init__(
        self,
        plan: Layout,
        options: EngineOptions,
        *,
        device: str = "cpu",
        timeout_seconds: float = 600.0,
        reducer: Callable[[StageGradients], Reducer] | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.options = options
        self.reducer = reducer
        self.engine: Engine | None = None
        self.stopped = False  # whether a signal stopped the run; all ranks stop after the same step
        self.meter: MemoryMeter | None = None
        self.last_step: FinishedStep | None = None
        self.exchange: ReplicaExchange | None = None  # exchanges momentum instead of gradients
        self.averages: dict[str, Tensor] = {}  # of this rank's trained weights by global name, if some are kept
        self._device_type = device
        self._timeout = timedelta(seconds=timeout_seconds)
        self._is_updating = False  # whether the optimizer has begun an update and not ended it
        self._batch: StepBatch | None = None
        self._finished: list[FinishedStep] = []  # and not yet asked for
        self.submit_seconds = 0.0  # that the engine was given for the last step
        self.rates: list[float] = []  # learning rates of the last step that was submitted, by parameter group
        self._rates: dict[int, list[float]] = {}  # the same of the steps under way

    # Where this rank stands

    @property
    @override
    def root_device(self) -> torch.device:
        return device_of(self._device_type, self.local_rank)

    @property
    def view(self) -> RankView:
        """The position of this rank in the plan."""
        return RankView.of(self.plan.topology, self.global_rank, microbatches=self.options.microbatches)

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages on this rank."""
        return self.plan.topology.stages_of(self.global_rank)

    @property
    def replica(self) -> int:
        return self.plan.topology.coordinates(self.global_rank).data

    @property
    def shard(self) -> int:
        """The number of this rank's part of each divided layer."""
        return self.plan.topology.coordinates(self.global_rank).tensor

    @property
    def num_replicas(self) -> int:
        return self.plan.topology.num_replicas

    # Setting up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]
        world_size = self.plan.topology.world_size
        if self.world_size != world_size:
            rule = f"must make {world_size} ranks on all nodes together"
            why = f"There are {self.world_size}, and each stage of each replica has one"
            nodes = getattr(self, "num_nodes", 1)  # a script's
            fix = f"Trainer(devices={world_size // nodes})" if world_size % nodes == 0 else ""
            raise RequestError([Problem("Trainer.devices", self.world_size // nodes, rule, why, fix)])
        if world_size > 1 and not dist.is_initialized():
            assert self.cluster_environment is not None
            environment = self.cluster_environment
            dist.init_process_group(
                backend_of(self._device_type),
                init_method=f"tcp://{environment.main_address}:{environment.main_port}",
                rank=environment.global_rank(),
                world_size=world_size,
                timeout=self._timeout,
            )
            atexit.register(destroy_process_groups)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        atexit.unregister(destroy_process_groups)  # it could wait for peers that have ended

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """True: stages exist, and can load a checkpoint, only after the strategy is set up."""
        return True

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._without_collectives(trainer)
        module: Any = self.lightning_module
        if not isinstance(module, PipelineModule):
            raise TypeError(f"a {type(module).__name__} has no loss_function and build_stages: see PipelineModule")
        if self.engine is None:
            self.build(module)
        else:
            self.model_to_device()  # an earlier run has moved it away at its end
            if self.engine.swap is not None:
                self.engine.swap.claim()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self.attach(module)
        self.setup_precision_plugin()

    def build(self, module: PipelineModule, transport: Transport | None = None) -> None:
        """Make the engine of this rank's stages.

        Args:
            module: has the stages and the loss.
            transport: sends and receives messages; None: the one of this run's processes.
        """
        self.engine = self._build_engine(module, transport)
        if self.reducer is not None:
            self.engine.reduce_by(self.reducer)
        self.meter = MemoryMeter(self.engine)

    def attach(self, module: PipelineModule) -> None:
        """Let the engine update the weights by the strategy's optimizer, which exists by now."""
        assert self.engine is not None
        optimizer = self.optimizers[0]
        master_of = optimizer.master_of if isinstance(optimizer, MasterWeights) else None
        backup = OptimizerBackup(optimizer) if self.options.post_validation else None
        begin, filler = self._attach_watch(optimizer, module)
        foresight = None
        if self.plan.prediction is not None:
            foresight = Forecast(self.plan.prediction.kind, optimizer, self._rates.get)
        copies = optimizer.copies if isinstance(optimizer, ElasticAverage) else None
        if copies is None and self.plan.schedule.own_weights:
            raise RequestError([_one_copy(self.plan.schedule.name)])
        self.engine.attach_optimizer(self._apply_update, master_of, backup, begin, filler, foresight, copies)
        crossing = [tie.name for tie in crossing_ties(module.ties, self.plan.partition)]
        self.exchange = attach_compression(optimizer, self.engine, crossing)

    def _attach_watch(
        self, optimizer: Optimizer, module: PipelineModule
    ) -> tuple[Callable[[], None] | None, Filler | None]:
        """If the optimizer sees the layers: the function to call before a step, or the object that does its work where
        the schedule has that in its bubbles."""
        watch = watch_of(optimizer)
        if watch is None:
            return None, None
        assert self.engine is not None
        assert self.meter is not None
        filler = None
        if self.plan.schedule.filling is not None:
            filler = watch.filler(self.engine.stages, module.ties)
        else:
            watch.watch(self.engine.stages, module.ties)
        self.meter.watch(watch.held)
        return None if filler is not None else watch.begin, filler

    def _without_collectives(self, trainer: pl.Trainer) -> None:
        """Remove Lightning's own collectives from steps and signal handlers; SIGTERM requests a stop after the step.

        Lightning is not told about the signal during a fit: it would raise after this rank's own step, when other ranks
        may have begun the next one, and the last step would not be saved.
        """
        connector = trainer._signal_connector

        def note(signum: int, frame: Any) -> None:
            if self.engine is not None and trainer.state.fn == TrainerFn.FITTING:
                self.engine.request_stop()
            else:
                connector.received_sigterm = True

        cast(Any, trainer.fit_loop.epoch_loop)._broadcast_sigterm_tensor = lambda: None
        cast(Any, connector)._sigterm_notifier_fn = note

    def _build_engine(self, module: PipelineModule, transport: Transport | None) -> Engine:
        stages = module.build_stages(self.plan.partition, self.stages)
        raise_problems(running_statistics_problems(self.view, stages, self.plan.schedule.name))
        raise_problems(extra_state_problems(stages))
        activations = self.plan.activations
        offload = make_offload(self.plan, stages, self.options, self.root_device, self._moving)
        for number, stage in stages.items():
            cast_module(stage.to(device=self.root_device), self.options.dtype)
            program = activations.stages[number]
            install(stage, program, to_host=activations.to_host, moving=self._moving, offload=offload)
            if self.options.compile:
                compile_layers(stage, share=self.options.compile_share)
        swap = swap_weights(self.plan, stages, module.ties, self.options, self.root_device, self._moving, offload)
        schedule, view = self.plan.schedule, self.view
        if transport is None:
            transport = make_transport(
                self.plan, module.ties, self.options, self.root_device, timeout_seconds=self._timeout.total_seconds()
            )
        shards: Mapping[str, Shard] = {}
        tensor_group = None
        division = getattr(module, "division", None)
        if division is not None:
            shards, tensor_group = division.shards, TensorGroup(transport, view.shards, self.options.tensor_sums)
            division.group.exchange = tensor_group
        return Engine(
            view=view,
            training=self.plan.program,
            forward_only=lower(forward_only(schedule, self.options.microbatches)),
            stages=stages,
            loss=module.loss_function,
            transport=transport,
            options=self.options,
            tags=self._tags_of(stages, module, shards),
            sharding=self._sharding_of(stages),
            tensor_group=tensor_group,
            keep=self._gradients_of,
            prediction=self.plan.prediction,
            offload=offload,
            swap=swap,
        )

    def _tags_of(
        self, stages: Mapping[int, StageModule], module: PipelineModule, shards: Mapping[str, Shard]
    ) -> dict[str, ParameterTag]:
        return tags_of(
            stages,
            ties=module.ties,
            partition=self.plan.partition,
            ranks_of_stage=partial(self.plan.topology.holders, shard=self.shard),
            later_copies=self.view.later_copies,
            shards=shards,
            is_first_shard=self.view.is_first_shard,
        )

    def move_layers(self, module: PipelineModule, plan: Layout) -> int:
        """Go on with other layers in the stages, between two steps; all ranks call it after the same step.

        The optimizer stays the object that it is. Gradients have no memory meanwhile.

        Args:
            module: has the stages.
            plan: the plan with another partition, and with what is kept of its stages; the rest is that of before.

        Returns:
            the bytes that this rank has sent.

        Raises:
            RunFailedError: something that belongs to a layer cannot leave its rank.
        """
        assert self.engine is not None
        engine, optimizer = self.engine, unwrapped(self.optimizers[0])
        self._finished += engine.drain()
        moves = moves_between(self.plan.partition, plan.partition, plan.schedule.placement[0])
        require_movable(engine.stages.values(), moves)
        engine.let_go()
        held, averages = held_bytes(engine, optimizer), num_bytes(self.averages)
        own = Belongings(optimizer, self.averages, named_parameters(engine.stages))
        before, position, ranks = layers_in(engine.stages.values()), self.view.position, self.view.pipeline
        leaving = [move for move in moves if move.source == position]
        sent = [send_layer(before[move.layer], own, engine.transport, ranks[move.target]) for move in leaving]
        self.plan = plan
        stages = module.build_stages(plan.partition, self.stages)
        layers = layers_in(stages.values())
        stay = [tensor for number, layer in layers.items() if number in before for tensor in tensors_of(layer)]
        for move in leaving:
            emptied(before[move.layer], stay)  # what is on its way keeps its memory until it has arrived
        received = 0
        for move in moves:
            if move.target == position:
                emptied(layers[move.layer], stay)  # a module that was made only now has weights of its own
                cast_module(layers[move.layer].to(device=self.root_device), self.options.dtype)
                received += receive_layer(layers[move.layer], own, engine.transport, ranks[move.source])
        for messages, _ in sent:
            for handle, _ in messages:
                handle.wait()
        for number, stage in stages.items():
            stage.note_built()
            install(stage, plan.activations.stages[number])
        engine.hold(stages, self._tags_of(stages, module, {}))
        assert self.meter is not None
        self.meter.layers_moved(held["weights"] + held["optimizer"] + averages + received)
        self.meter.hold(num_bytes(self.averages))
        self.watch_states()
        return sum(num_bytes for _, num_bytes in sent)

    def _moving(self) -> AbstractContextManager[None]:
        """The context in which offloading moves tensors; the engine's timeline measures it."""
        assert self.engine is not None
        return self.engine.timeline.moving()

    def _sharding_of(self, stages: Mapping[int, StageModule]) -> Sharding | None:
        """The object that keeps the gradients of this rank's stages instead of the engine, or None."""
        return None

    def _gradients_of(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], tag: ParameterTag | None
    ) -> StageGradients:
        """The gradients of one stage if the engine keeps them; see :data:`runner.engine.update.sets.Keep`."""
        return StageGradients(parameters, tag)

    # A step

    def hand_over(self, batch: StepBatch) -> Tensor:
        """Take the batch of the next :meth:`optimizer_step`; a ``training_step`` returns the result, a zero loss."""
        self.require_step()
        self._batch = batch
        return torch.zeros((), device=self.root_device)

    def require_step(self) -> None:
        """Refuse a module's own ``optimizer_step`` that has left the batch out: the engine computes it in that step.

        Raises:
            RequestError: the step of the batch that was handed over was not made.
        """
        if self._batch is not None:
            raise self._no_step()

    def _no_step(self) -> RequestError:
        name = type(self.lightning_module).__name__
        rule = f"must have {name}.optimizer_step call optimizer.step(closure=closure) once for each batch"
        why = "The gradients of a batch are computed within that step, and would be lost without it"
        fix = "a larger data.batch_size and schedule.microbatches, which accumulate"
        return RequestError([Problem("model.target", name, rule, why, fix)])

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Do nothing: the engine runs forward and backward together."""
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = closure()
        assert self.engine is not None
        if self._batch is None:
            raise self._no_step()
        batch, self._batch = self._batch, None
        assert self.meter is not None
        self.rates = self._rates[self.engine.step] = [group["lr"] for group in self.optimizers[0].param_groups]
        begun = time.perf_counter()
        with self.meter.step(batch):
            finished = self.engine.submit(batch)
        self.submit_seconds = time.perf_counter() - begun
        self._finished += finished
        self.last_step = finished[-1] if finished else None
        if self.last_step is not None:
            _tell_loss(closure, self.last_step.loss)
            self._log_figures(self.last_step)
            if self.last_step.skipped:
                self.meter.skipped()
        if self.engine.stops:
            self.stopped = True
            assert self.lightning_module is not None
            self.lightning_module.trainer.should_stop = True
        return result

    def _log_figures(self, step: FinishedStep) -> None:
        """Log what the module's traced ``training_step`` logs, over the whole batch and on every rank."""
        for figure, value in zip(self.options.figures, step.figures, strict=True) if step.samples else ():
            assert self.lightning_module is not None
            self.lightning_module.log(figure.name, value, batch_size=step.samples, **figure.shown)

    def take_finished(self, *, settled: bool = False) -> list[FinishedStep]:
        """The steps that ended since the last call, in order.

        Args:
            settled: first finish what is under way. All ranks must ask for it after the same step.
        """
        if settled and self.engine is not None:
            self._finished += self.engine.drain()
        finished, self._finished = self._finished, []
        return finished

    @override
    def on_train_end(self) -> None:
        """Complete the last step, so that its weights are final before they are read as the run's result."""
        self.require_step()
        if self.engine is not None:
            self._finished += self.engine.drain()

    def _apply_update(self) -> None:
        """Call Lightning's hooks and then the optimizer; the engine's gradients are final.

        An optimizer that draws random numbers draws the same on every replica.
        """
        assert self.engine is not None
        seed_generators(mix_seed(self.options.seed, self.engine.updating, "update"))
        optimizer = self.optimizers[0]
        if self.lightning_module is not None:  # a run that is played has no Trainer
            self._call_hooks(self.lightning_module, optimizer)
        self._is_updating = True
        with self._rates_of_step(optimizer):
            self._step_optimizer()
        self._is_updating = False

    def _call_hooks(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        before = [group["lr"] for group in optimizer.param_groups]
        for callback in module.trainer.callbacks:  # type: ignore[attr-defined]  # it is the Trainer's list
            with self._clipping_refused(callback):
                callback.on_before_optimizer_step(module.trainer, module, optimizer)
        with self._clipping_refused(module):
            module.on_before_optimizer_step(optimizer)
        self._take_rates(before, [group["lr"] for group in optimizer.param_groups])

    def _clipping_refused(self, owner: object) -> AbstractContextManager[None]:
        topology = self.plan.topology
        if topology.world_size == self.num_replicas:
            return nullcontext()
        return refusing_norms_of_a_part(type(owner).__name__, divided=topology.num_shards > 1)

    def _take_rates(self, before: list[float], now: list[float]) -> None:
        """Take learning rates that a hook has just set for those of the step that is being applied."""
        assert self.engine is not None
        rates = self._rates.get(self.engine.updating)
        if now != before and rates is not None:
            rates[:] = now  # the same list as ``rates`` where it is the step that was submitted last

    def give_up_step(self, *, together: bool) -> bool:
        """Drop a step that has failed, so that the state before it can be saved.

        Args:
            together: whether all ranks call it for the same step; else there must be no other rank.

        Returns:
            whether that state is whole and finite on all ranks.
        """
        if self.engine is None or (self.world_size > 1 and not together):
            return False
        is_good = False
        with suppress(Exception):  # what ended the run is told elsewhere; the other ranks wait for this one's answer
            is_good = not self._is_updating and self.engine.give_up() and self._is_finite()
        return all(self.all_gather_objects(is_good))

    def _is_finite(self) -> bool:
        """Whether the weights, buffers and optimizer states of this rank are finite."""
        assert self.engine is not None
        held: list[Any] = [value for module in self.engine.stages.values() for value in module.state_dict().values()]
        for optimizer in self.optimizers:
            held += [value for state in optimizer.state.values() for value in state.values()]
        tensors = [value for value in held if isinstance(value, Tensor) and value.is_floating_point()]
        return all(bool(torch.isfinite(value).all()) for value in tensors)

    @contextmanager
    def _rates_of_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Within the block, the learning rates are those of the step that is being applied.

        Lightning's scheduler may be further ahead, because later batches have been submitted.
        """
        assert self.engine is not None
        now = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates.get(self.engine.updating, now), strict=True):
            group["lr"] = rate
        with scaled_rates(optimizer, self.engine.rate_factor):
            yield
        for group, rate in zip(optimizer.param_groups, now, strict=True):
            group["lr"] = rate
        for step in [step for step in self._rates if step < self.engine.updating]:
            del self._rates[step]

    def _step_optimizer(self) -> None:
        self.optimizers[0].step()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer states on this rank: see :func:`held_bytes`."""
        assert self.engine is not None
        return held_bytes(self.engine, self.optimizers[0])

    def bytes_to_replicas(self, steps: int) -> dict[str, float]:
        """Bytes that this rank sent to other holders of its stages in a mean step, by kind.

        Gradients are counted where they are sent: once a 1-bit optimizer sends its momentum, almost none.
        """
        assert self.engine is not None
        reduced = sum(gradients.sent.num_bytes for gradients in self.engine.all_gradients)
        momentum = self.exchange.bytes_sent if self.exchange is not None else 0
        return {
            "weights": sum(exchange.bytes_sent for exchange in self.engine.waves.values()) / steps,
            "weight_gradients": reduced / steps,
            "optimizer_states": momentum / steps,
        }

    def predict(self, batch: StepBatch) -> Any:
        """The last layer's output for a batch, on the ranks of the last stage; None on other ranks."""
        if self.engine is None:
            raise RuntimeError("the strategy is not set up")
        return self.engine.predict(batch)

    def evaluate(self, batch: StepBatch) -> tuple[float, float]:
        """``(sum, weight)`` of the loss of one validation batch, over this rank's pipeline."""
        if self.engine is None:
            raise RuntimeError("the strategy is not set up")
        return self.engine.evaluate(batch)

    def validate(self, batch: StepBatch) -> list[tuple[float, float]]:
        """``(sum, weight)`` of the loss and of each metric of the options, as :meth:`evaluate`."""
        if self.engine is None:
            raise RuntimeError("the strategy is not set up")
        return self.engine.validate(batch)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return the batch unchanged on the CPU; on CUDA move it as a whole."""
        from lightning.fabric.utilities import move_data_to_device

        target = device or self.root_device
        return batch if target.type == "cpu" else move_data_to_device(batch, target)

    @override
    def on_train_start(self) -> None:
        """Let the engine count steps from the restored progress, which was not known in :meth:`setup`.

        Weights are what they are at the first step, so their copies are compared.
        """
        assert self.engine is not None
        assert self.lightning_module is not None
        self.engine.start_at(self.lightning_module.trainer.global_step)
        self.engine.compare_copies()
        self.watch_states()

    def watch_states(self) -> None:
        """Count the optimizer states that exist before the first step."""
        assert self.meter is not None
        for optimizer in self.optimizers:
            for weight, state in optimizer.state.items():
                # Step counters, which have no axis, are not counted in a new run either.
                tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
                (self.meter.leave_out if is_at_home(weight) else self.meter.watch)(tensors)


def _one_copy(schedule: str) -> Problem:
    rule = f"must be named with schedule={schedule}"
    why = "The optimizer of configure_optimizers would update one copy of the weights, not those of every pipeline"
    return Problem("optimizer.name", "auto", rule, why, "optimizer=adamw")


def _tell_loss(closure: Callable[[], Any], loss: float) -> None:
    """Set ``outputs["loss"]`` of Lightning's ``on_train_batch_end`` to the step's loss.

    It is set afterwards because the closure ran before the engine.
    """
    outputs = getattr(getattr(closure, "_result", None), "loss", None)
    if isinstance(outputs, Tensor):
        outputs.fill_(loss)

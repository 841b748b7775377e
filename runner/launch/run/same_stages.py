"""Gives a resumed run the stages of the run that it continues.

Where stages begin, and where work lies between their computations, may follow from measured seconds, which are others
each time. A synchronous schedule gives the same bits with all of them. The weight versions of an asynchronous one, and
the steps at which K-FAC's inverses are replaced in bubbles, do not.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.schema import RunConfig
from runner.launch.run.machines import MachineFacts, this_machine

if TYPE_CHECKING:
    from runner.plan.values import RunPlan

__all__ = ["with_stages_before"]

logger = logging.getLogger(__name__)


def with_stages_before(config: RunConfig, plan: RunPlan, machine: MachineFacts | None = None) -> RunPlan:
    """The plan with the stages, and the order of work, of the run whose checkpoint ``config.resume`` is.

    It is ``plan`` itself if the request begins anew or says its stages, if it leaves the schedule to the plan, if the
    number of stages or layers has changed, or if nothing beside the checkpoint says what they were.

    Args:
        config: the request; its ``resume`` is a checkpoint's path or None.
        plan: the plan of the request alone.
        machine: the smallest machine of the run; None: this one.
    """
    if config.resume is None:
        return plan
    from runner.plan.cut.chosen import FIXED, with_partition
    from runner.plan.make import make_plan
    from runner.plan.requested_schedule import follows_profile, is_chosen_by_plan
    from runner.plan.values import RunPlan as Stored

    if config.partition.name in FIXED or is_chosen_by_plan(config):
        return plan
    before = Path(config.resume).parent.parent
    try:
        stored = Stored.load(before)
    except (OSError, ValueError) as error:
        if plan.schedule.is_asynchronous:
            logger.warning("the stages are planned anew, which may give other losses: no plan of before (%s)", error)
        return plan
    partition = stored.partition
    profile = stored.profile if follows_profile(config) else plan.profile
    sizes = [(len(stages), stages[-1][-1]) for stages in (partition, plan.partition)]
    if sizes[0] != sizes[1] or (partition == plan.partition and profile == plan.profile):
        return plan
    devices = stored.devices if Counter(stored.devices) == Counter(plan.devices) else plan.devices
    again = make_plan(with_partition(config, partition, devices), profile, **asdict(machine or this_machine(config)))
    if not again.fits:
        logger.warning("the stages of %s would not fit here: an asynchronous schedule gives other losses", before)
        return plan
    logger.info("the stages are those of %s", before)
    return again

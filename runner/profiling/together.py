"""Profiles many requests of one model in one process, in which the model is traced once for each way to divide it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.model.apart import ApartError, EndedError, apart
from runner.model.fake import fake_tensors
from runner.model.traced.kept import keeping_traces
from runner.profile import ModelProfile
from runner.profiling.cache import known_profile
from runner.profiling.model import example_microbatch, faked_profile, profile_model, samples_of

__all__ = ["ProfilesTogether"]

_Found: TypeAlias = ModelProfile | RequestError | str
"""A profile, what refuses the request, or why its model cannot run on fake tensors."""


class ProfilesTogether:
    """Makes the profiles of requests that ask for the same model.

    The first that is asked for and that no cache knows is made together with all that are expected.

    Args:
        expected: requests that will probably be asked for.
    """

    def __init__(self, expected: Sequence[RunConfig]) -> None:
        self._expected = list(expected)
        self._found: dict[tuple[int, ...], _Found] | None = None

    def __call__(self, config: RunConfig) -> ModelProfile:
        """The profile of a request, like :func:`runner.profiling.model.profile_model`."""
        return profile_model(config, self._on_fake_tensors)

    def _on_fake_tensors(self, config: RunConfig, inputs: Any, targets: Any) -> ModelProfile:
        if self._found is None:
            wanted = [each for each in self._expected if known_profile(each) is None]
            try:
                found = apart(_all_of_them, wanted)
            except EndedError:  # one of them ends the process: each gets its own
                found = []
            self._found = {_kind(each): made for each, made in zip(wanted, found, strict=False)}
        made = self._found.get(_kind(config))
        if isinstance(made, ModelProfile):
            return made
        if isinstance(made, RequestError):
            raise made
        if isinstance(made, str):
            raise ApartError(made)
        return apart(faked_profile, config, inputs, targets)


def _kind(config: RunConfig) -> tuple[int, ...]:
    return config.parallelism.tensor, config.parallelism.pipeline, samples_of(config)


def _all_of_them(requests: Sequence[RunConfig]) -> list[_Found]:
    mode = fake_tensors()
    with keeping_traces():
        return [_one(request, mode) for request in requests]


def _one(request: RunConfig, mode: Any) -> _Found:
    try:
        return faked_profile(request, *example_microbatch(request), mode)
    except RequestError as error:
        return error
    except Exception as error:
        return str(error) or type(error).__name__

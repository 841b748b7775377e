"""Makes a request that fails smaller, and says by what one sees it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

from draws import Drawn, Words
from oracles import check
from tensor_equality import WrongError

_MODEL = ("model.target", "model.kwargs.kind", "data.target", "data.kwargs.kind", "loss.target")
_SMALLER = {"parallelism.pipeline", "parallelism.data", "schedule.microbatches", "data.batch_size", "schedule.chunks"}


@dataclass(frozen=True)
class Failure:
    """A request that breaks an oracle or crashes.

    Args:
        drawn: the request.
        kind: what an equal failure has in common: the oracle's words without numbers, or the error and its place.
        told: what is wrong.
    """

    drawn: Drawn
    kind: str
    told: str

    def text(self) -> str:
        lines = [self.told, self.drawn.line()]
        if self.drawn.resumed is not None:
            other = " ".join(f"{key}={value}" for key, value in self.drawn.resumed.items()) or "the same layout"
            lines.append(f"saved after step {self.drawn.saved} and resumed in {other}")
        if self.drawn.limit is not None:
            lines.append(f"with memory_limit at {self.drawn.limit} of what it needs without one")
        return "\n".join(lines)


def failure_of(drawn: Drawn) -> Failure | None:
    """Check a request; None if all is well."""
    try:
        check(drawn)
    except WrongError as error:
        words = str(error).split()
        return Failure(drawn, " ".join(word for word in words if word.isalpha()), str(error))
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/runner/" in frame.filename]
        place = f"{frames[-1].filename}:{frames[-1].name}" if frames else ""
        return Failure(drawn, f"{type(error).__name__} {place}", "".join(traceback.format_exception(error)))
    return None


def shrunk(failure: Failure, tries: int = 60) -> Failure:
    """The same failure with as little as possible.

    Args:
        failure: what was found.
        tries: the most requests that are run.
    """
    while tries:
        for drawn in _smaller(failure.drawn):
            tries -= 1
            found = failure_of(drawn)
            if found is not None and found.kind == failure.kind:
                failure = found
                break
            if not tries:
                break
        else:
            break
    return failure


def _smaller(drawn: Drawn) -> Iterator[Drawn]:
    """Requests with one thing less, what is most first."""
    if drawn.resumed is not None:
        yield replace(drawn, resumed=None)
        if drawn.resumed:
            yield replace(drawn, resumed={})
    if drawn.rehearses:
        yield replace(drawn, rehearses=False)
    if drawn.limit is not None:
        yield replace(drawn, limit=None, words=_without(drawn.words, "memory_limit"))
    groups = [key for key in drawn.words if "." not in key]
    for key in groups:
        yield replace(drawn, words={name: each for name, each in drawn.words.items() if name.split(".")[0] != key})
    for key in [key for key in drawn.words if key not in _MODEL and key not in groups]:
        yield replace(drawn, words=_without(drawn.words, key))
    for key in _SMALLER & drawn.words.keys():
        number = int(drawn.words[key])
        for less in dict.fromkeys((1, number // 2, number - 1)):
            if 0 < less < number:
                yield replace(drawn, words=drawn.words | {key: str(less)})


def _without(words: Words, key: str) -> Words:
    return {name: value for name, value in words.items() if name != key}

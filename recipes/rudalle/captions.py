"""Which emoji, and what they are called in Russian (Unicode CLDR's names, as the package ``emoji`` ships them)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

__all__ = ["clean_caption", "emoji_list", "later_emoji_list", "repair_map"]

_FULLY_QUALIFIED = 2
_NEWEST_VERSION = 11.0  # the emoji of 2018: about the set that Emojich was tuned on
_WORD = re.compile(r"\w+")
_SKIN_TONE = re.compile(r"\s*(?:очень\s+)?(?:светлый|средний|т[её]мный)\s+тон\s+кожи")


def emoji_list() -> dict[str, str]:
    """Emoji to its clean caption, of the fully qualified ones up to version 11, in code-point order."""
    return _captions(lambda version: version <= _NEWEST_VERSION)


def later_emoji_list() -> dict[str, str]:
    """The same of the fully qualified ones that are newer than version 11."""
    return _captions(lambda version: version > _NEWEST_VERSION)


def _captions(asked: Callable[[float], bool]) -> dict[str, str]:
    import emoji

    emoji.config.load_language("ru")
    named = {symbol: entry for symbol, entry in sorted(emoji.EMOJI_DATA.items()) if "ru" in entry}
    repairs = repair_map(_plain(entry["ru"]) for entry in named.values())
    return {
        symbol: clean_caption(entry["ru"], repairs)
        for symbol, entry in named.items()
        if entry["status"] == _FULLY_QUALIFIED and asked(entry["E"])
    }


def clean_caption(name: str, repairs: Mapping[str, str]) -> str:
    """``name`` in lower case without colons, underscores and skin tone, its lost breves restored."""
    repaired = _WORD.sub(lambda match: repairs.get(match[0], match[0]), _plain(name))
    return " ".join(_SKIN_TONE.sub("", repaired).replace(":", " ").split())


def repair_map(names: Iterable[str]) -> dict[str, str]:
    """Words whose ``й`` became ``и``, to the spelling with ``й`` seen elsewhere; only where there is one.

    Older entries of the package have lost the breve ("среднии"), newer ones have it.
    """
    spellings: dict[str, set[str]] = defaultdict(set)
    for name in names:
        for word in _WORD.findall(name):
            if "й" in word:
                spellings[word.replace("й", "и")].add(word)
    return {stripped: found.pop() for stripped, found in spellings.items() if len(found) == 1}


def _plain(name: str) -> str:
    return name.strip(":").replace("_", " ").lower()

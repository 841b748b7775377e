"""A small byte-pair encoding over characters: enough for a few thousand captions, with nothing to install."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["BOS", "EOS", "PAD", "UNK", "Bpe", "train_bpe"]

PAD, UNK, BOS, EOS = range(4)
_SPECIAL = 4
_SPACE = "\u2581"  # marks where a word begins, so that text is the joined pieces

Pair = tuple[str, str]


@dataclass(frozen=True)
class Bpe:
    """Pieces by id (after the four special ids) and the merges in the order in which they were learned."""

    pieces: tuple[str, ...]
    merges: tuple[Pair, ...]

    @property
    def size(self) -> int:
        """Ids in all."""
        return _SPECIAL + len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Ids of lower-cased ``text``, without begin and end marks; unknown characters become UNK."""
        ids, ranks = self._tables
        return [ids.get(piece, UNK) for word in _words(text) for piece in _merge(list(word), ranks)]

    @cached_property
    def _tables(self) -> tuple[dict[str, int], dict[Pair, int]]:
        """Piece to id, and merge to rank."""
        ids = {piece: index for index, piece in enumerate(self.pieces, start=_SPECIAL)}
        return ids, {pair: rank for rank, pair in enumerate(self.merges)}

    def encode_batch(self, texts: Sequence[str], length: int) -> list[list[int]]:
        """BOS, ids, EOS, and pads up to ``length``; a longer text is cut and has no EOS."""
        rows = []
        for text in texts:
            row = [BOS, *self.encode(text), EOS][:length]
            rows.append(row + [PAD] * (length - len(row)))
        return rows

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special ids have none."""
        text = "".join(self.pieces[index - _SPECIAL] for index in ids if index >= _SPECIAL)
        return text.replace(_SPACE, " ").strip()


def train_bpe(texts: Iterable[str], vocab_size: int) -> Bpe:
    """Merge the most frequent neighbours, ties in alphabetical order, until there are ``vocab_size`` ids.

    Fewer ids result where every word has become one piece.

    Raises:
        ValueError: ``vocab_size`` does not even hold the characters.
    """
    counts = Counter(word for text in texts for word in _words(text))
    words = [list(word) for word in counts]
    weights = list(counts.values())
    pieces = sorted({char for word in words for char in word})
    if _SPECIAL + len(pieces) > vocab_size:
        raise ValueError(f"text_vocab = {vocab_size} must be at least {_SPECIAL + len(pieces)}, one id per character")
    pairs: dict[Pair, int] = defaultdict(int)
    places: dict[Pair, set[int]] = defaultdict(set)
    for index in range(len(words)):
        _count(words, weights, index, pairs, places, 1)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    known = set(pieces)
    while heap and _SPECIAL + len(pieces) < vocab_size:
        negative, pair = heapq.heappop(heap)
        if pairs[pair] != -negative or not negative:
            continue  # an older count of this pair
        merges.append(pair)
        joined = "".join(pair)
        if joined not in known:
            known.add(joined)
            pieces.append(joined)
        for changed in _apply(pair, words, weights, pairs, places):
            heapq.heappush(heap, (-pairs[changed], changed))
    return Bpe(tuple(pieces), tuple(merges))


def _words(text: str) -> list[str]:
    return [_SPACE + word for word in text.lower().split()]


def _count(
    words: list[list[str]],
    weights: list[int],
    index: int,
    pairs: dict[Pair, int],
    places: dict[Pair, set[int]],
    sign: int,
) -> set[Pair]:
    """Add (or, with sign -1, take away) one word's neighbours; return them."""
    word = words[index]
    found = set(zip(word, word[1:], strict=False))
    for pair in zip(word, word[1:], strict=False):
        pairs[pair] += sign * weights[index]
    for pair in found:
        (places[pair].add if sign > 0 else places[pair].discard)(index)
    return found


def _apply(
    pair: Pair,
    words: list[list[str]],
    weights: list[int],
    pairs: dict[Pair, int],
    places: dict[Pair, set[int]],
) -> set[Pair]:
    """Merge ``pair`` in every word; return the pairs whose counts changed."""
    changed: set[Pair] = set()
    for index in sorted(places[pair]):
        changed |= _count(words, weights, index, pairs, places, -1)
        words[index] = _join(words[index], pair)
        changed |= _count(words, weights, index, pairs, places, 1)
    return changed


def _merge(symbols: list[str], ranks: dict[Pair, int]) -> list[str]:
    """Apply the learned merges to one word, earliest learned first."""
    while True:
        best = min(zip(symbols, symbols[1:], strict=False), key=lambda pair: ranks.get(pair, len(ranks)), default=None)
        if best is None or best not in ranks:
            return symbols
        symbols = _join(symbols, best)


def _join(symbols: list[str], pair: Pair) -> list[str]:
    joined: list[str] = []
    index = 0
    while index < len(symbols):
        if index + 1 < len(symbols) and (symbols[index], symbols[index + 1]) == pair:
            joined.append(symbols[index] + symbols[index + 1])
            index += 2
        else:
            joined.append(symbols[index])
            index += 1
    return joined

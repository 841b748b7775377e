from __future__ import annotations

import math

import pytest
import torch

from runner.recipes.rudalle import patches
from runner.recipes.rudalle.bpe import BOS, EOS, PAD, UNK, train_bpe
from runner.recipes.rudalle.captions import clean_caption, emoji_list, repair_map
from runner.recipes.rudalle.token_baselines import measure_baselines


@pytest.mark.costly
def test_bpe_round_trip_on_all_captions() -> None:
    captions = list(emoji_list().values())
    bpe = train_bpe(captions, 1024)
    assert bpe.size == 1024
    assert all(bpe.decode(bpe.encode(caption)) == caption for caption in captions)
    assert max(len(bpe.encode(caption)) for caption in captions) <= 22  # with both marks within 24


def test_bpe_merges_the_most_frequent_pair_first() -> None:
    bpe = train_bpe(["abab abc", "ab"], vocab_size=9)
    assert bpe.merges[0] == ("a", "b")
    assert len(bpe.pieces) == 5  # the mark of a word's begin, a, b, c, ab
    assert bpe.encode("abab") == [bpe.pieces.index(piece) + 4 for piece in ("\u2581", "ab", "ab")]


def test_bpe_ends_when_every_word_is_one_piece() -> None:
    bpe = train_bpe(["ab", "cd"], vocab_size=100)
    assert len(bpe.encode("ab cd")) == 2
    assert bpe.size < 100


def test_bpe_marks_pads_unknowns_and_cuts() -> None:
    bpe = train_bpe(["ab"], vocab_size=100)
    rows = bpe.encode_batch(["AB", "?", "ab ab ab"], length=4)
    ab = bpe.encode("ab")[0]
    assert rows[0] == [BOS, ab, EOS, PAD]
    assert rows[1][:2] == [BOS, bpe.encode("?")[0]]
    assert UNK in rows[1]
    assert rows[2] == [BOS, ab, ab, ab]
    assert bpe.decode(rows[0]) == "ab"


def test_bpe_refuses_fewer_ids_than_characters() -> None:
    with pytest.raises(ValueError, match="text_vocab = 5 must be at least 7"):
        train_bpe(["ab"], vocab_size=5)


def test_captions_lose_skin_tones_and_get_their_breves_back() -> None:
    repairs = repair_map(["средний тон", "чёрный", "мой", "мои"])
    assert clean_caption(":поднятая_рука:_среднии_тон_кожи:", repairs) == "поднятая рука"
    assert clean_caption(":рука_очень_тёмный_тон_кожи:", {}) == "рука"
    assert clean_caption(":Среднии_палец:", repairs) == "средний палец"
    assert repair_map(["й1", "и1"]) == {"и1": "й1"}
    assert repair_map(["ййи", "ийй"]) == {}  # the same without breves: ambiguous


def test_caption_counts() -> None:
    captions = emoji_list()
    assert len(captions) == 2780
    assert len(set(captions.values())) == 1640
    assert list(captions) == sorted(captions)


def test_patches_round_trip() -> None:
    images = torch.randint(256, (3, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cut = patches.to_patches(images, 4)
    assert cut.shape == (3, 4, 48)
    assert torch.equal(cut[1, 1].view(4, 4, 3), images[1, :4, 4:].float())
    assert torch.equal(patches.from_patches(cut, 4), images)


def test_kmeans_is_deterministic_and_keeps_white_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.rand(5, 12, generator=generator) * 200
    points = centres[torch.randint(5, (400,), generator=generator)] + torch.randn(400, 12, generator=generator)
    points = torch.cat([points, torch.full((50, 12), 255.0)])
    codebook = patches.fit_codebook(points, 9, seed=1)
    assert torch.equal(codebook, patches.fit_codebook(points, 9, seed=1))
    assert not torch.equal(codebook, patches.fit_codebook(points, 9, seed=2))
    codes = patches.encode(points, codebook)
    assert (codes[-50:] == 0).all()
    assert (codes[:-50] > 0).all()
    assert (points - codebook[codes]).square().mean() < 2.0  # the noise's variance is 1


def test_encode_finds_the_nearest_code() -> None:
    generator = torch.Generator().manual_seed(0)
    points, codebook = torch.rand(50, 6, generator=generator), torch.rand(7, 6, generator=generator)
    assert torch.equal(patches.encode(points, codebook), torch.cdist(points, codebook).argmin(dim=1))


def test_kmeans_refuses_more_codes_than_patches() -> None:
    with pytest.raises(ValueError, match="codes = 9: there are only 3 patches"):
        patches.fit_codebook(torch.zeros(3, 12), 9, seed=0)


def test_psnr_by_hand() -> None:
    black = torch.zeros(1, 2, 2, 3, dtype=torch.uint8)
    assert patches.psnr(black, black + 5) == pytest.approx(20 * math.log10(255 / 5))


def test_baselines_know_what_they_should() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(8, (4000, 4, 1), generator=generator)
    codes = ((first + torch.arange(4)) % 8).flatten(1)  # each row counts up from a random code
    found = measure_baselines(codes[:3000], codes[3000:], num_codes=8, grid=4)
    assert found.uniform == pytest.approx(math.log(8))
    assert found.unigram == pytest.approx(math.log(8), abs=0.02)
    assert found.left_bigram == pytest.approx(math.log(8) / 4, abs=0.02)
    shifted = torch.arange(16).expand(100, 16) % 8
    assert measure_baselines(shifted, shifted, 8, 4).position_unigram < 0.02

"""Seeds depend on names alone, so that whoever generates a sample draws the same numbers."""

import itertools

import pytest

from common.seeds import seed_of

pytestmark = pytest.mark.unit


def test_all_samples_of_a_step_have_seeds_of_their_own() -> None:
    # 8 prompts x 4 samples x 2 attempts
    names = itertools.product(["run-a"], [f"p{i}" for i in range(8)], range(4), [1, 2])
    seeds = [seed_of(*name) for name in names]
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)  # an int64 column holds them


def test_every_name_and_its_place_count() -> None:
    seeds = {seed_of("a", 1, 2), seed_of("b", 1, 2), seed_of("a", 2, 1), seed_of("a", 12), seed_of("a", 1, 2, 0)}
    assert len(seeds) == 5
    assert seed_of("ab", "c") != seed_of("a", "bc")


def test_the_numbers_never_change() -> None:
    # xxh3-64 of the names, joined by the unit separator, without its lowest bit: the same in every process and release.
    assert seed_of("run", "prompt-3", 2, 1) == 422399199092657803

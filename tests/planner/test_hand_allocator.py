"""The allocator's less travelled ways, by hand: holes of an expandable range, oversized blocks, old segments."""

import pytest

from planner.allocator.caching import AllocatorConfig, CachingAllocator, read_intervals, replay
from planner.allocator.pool import Pool
from planner.errors import UsageError
from planner.replay.units import CAST, GATHER, REDUCE
from planner.run.framework import pick
from planner.units import MiB

EXPANDABLE = AllocatorConfig(expandable_segments=True)


def test_a_hole_is_mapped_page_by_page() -> None:
    device = CachingAllocator(EXPANDABLE)
    first, last = device.malloc(60 * MiB), device.malloc(20 * MiB)
    assert first is not None
    assert last is not None
    device.free(first)
    assert device.empty_cache() == 60 * MiB
    assert device.reserved_bytes == 20 * MiB
    # 10 MiB need one page of 20 of the hole; 30 more fit its rest in two pages
    assert device.malloc(10 * MiB) is not None
    assert device.reserved_bytes == 40 * MiB
    assert device.malloc(10 * MiB) is not None
    assert device.reserved_bytes == 40 * MiB
    assert device.malloc(30 * MiB) is not None
    assert device.reserved_bytes == 80 * MiB
    assert device.allocated_bytes == 70 * MiB


def test_only_whole_pages_are_unmapped() -> None:
    device = CachingAllocator(EXPANDABLE)
    first, middle, last = (device.malloc(size * MiB) for size in (10, 45, 5))
    assert first is not None
    assert middle is not None
    assert last is not None
    # the middle is 10 to 55 MiB of the range: one page from 20 to 40 is free
    device.free(middle)
    assert device.empty_cache() == 20 * MiB
    assert device.reserved_bytes == 40 * MiB
    # its ends of 10 and 15 MiB are free still
    assert device.malloc(15 * MiB) is not None
    assert device.malloc(10 * MiB) is not None
    assert device.reserved_bytes == 40 * MiB


def test_small_blocks_of_an_expandable_range_come_in_2_mib_pages() -> None:
    device = CachingAllocator(EXPANDABLE)
    for _ in range(3):
        assert device.malloc(MiB) is not None
    assert device.reserved_bytes == 4 * MiB


def test_room_limits_an_expandable_range() -> None:
    device = CachingAllocator(EXPANDABLE, capacity_bytes=50 * MiB)
    assert device.malloc(30 * MiB) is not None  # two pages
    assert device.malloc(10 * MiB) is not None  # the rest of them
    assert device.malloc(MiB * 11) is None  # a third would be 60
    assert device.reserved_bytes == 40 * MiB


def test_oversized_blocks_are_given_back_largest_first() -> None:
    config = AllocatorConfig(max_split_size_bytes=20 * MiB)
    device = CachingAllocator(config, capacity_bytes=100 * MiB)
    blocks = [device.malloc(size * MiB) for size in (22, 26, 30)]
    for block in blocks:
        assert block is not None
        device.free(block)
    # 30 and 26 together are less than 60, so 22 goes too
    assert device.malloc(60 * MiB) is not None
    assert device.reserved_bytes == 60 * MiB
    device = CachingAllocator(config, capacity_bytes=100 * MiB)
    for size in (22, 70):
        block = device.malloc(size * MiB)
        assert block is not None
        device.free(block)
    # one block of at least the request is enough: the smallest such, and 22 stays
    assert device.malloc(48 * MiB) is not None
    assert device.reserved_bytes == 22 * MiB + 48 * MiB


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        # sixteenths of a power of two above 512 x divisions
        (16, 17 * MiB, 17 * MiB),
        (16, 17 * MiB + 1, 18 * MiB),
        (2, 33 * MiB, 48 * MiB),
        (2, 48 * MiB + 1, 64 * MiB),
        (4, 2_048, 2_048),
        (4, 2_049, 2_560),
        (4, 2_600, 3_072),
        (1, 2_049, 2_560),
    ],
)
def test_fractions_of_a_power_of_two(divisions: int, size: int, rounded: int) -> None:
    device = CachingAllocator(AllocatorConfig(roundup_power2_divisions=divisions))
    assert device.round_size(size) == rounded


UNSLOTH = "roundup_power2_divisions:[32:256,64:128,256:64,>:32]"


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (1 * MiB + 1, 1 * MiB + 4096),  # below the first one named as that: 1 MiB / 256
        (33 * MiB + 1, 33 * MiB + MiB // 8),  # 32 MiB / 256
        (65 * MiB + 1, 65 * MiB + MiB // 2),  # 64 MiB / 128
        (129 * MiB + 1, 129 * MiB + 512),  # 128 MiB is not named
        (257 * MiB, 264 * MiB),  # ">" is from the last one named on: 256 MiB / 32, not / 64
        (1100 * MiB, 1120 * MiB),  # 1 GiB / 32
        (512 * 1024, 512 * 1024),
    ],
)
def test_divisions_by_interval(size: int, rounded: int) -> None:
    config = AllocatorConfig.parse(f"expandable_segments:True,{UNSLOTH}")
    assert config.expandable_segments
    assert CachingAllocator(config).round_size(size) == rounded


def test_blocks_rounded_up_take_what_they_are_rounded_to() -> None:
    device = CachingAllocator(AllocatorConfig.parse(UNSLOTH))
    assert device.malloc(257 * MiB) is not None
    assert (device.allocated_bytes, device.reserved_bytes) == (264 * MiB, 264 * MiB)


@pytest.mark.parametrize("text", ["[33:8]", "[32:6]", "[32]", "[>]", "[32:8,64:x]", "[]"])
def test_bad_intervals_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        AllocatorConfig.parse(f"roundup_power2_divisions:{text}")


@pytest.mark.parametrize(
    ("version", "rounded"),
    [("2024.9", 257 * MiB), ("2024.11.9", 264 * MiB), ("2025.1.6", 264 * MiB)],
)
def test_unsloth_rounds_from_2024_11_9_on(version: str, rounded: int) -> None:
    law = pick("unsloth", version).switches.roundup_power2
    config = AllocatorConfig(interval_divisions=read_intervals(law))
    assert CachingAllocator(config).round_size(257 * MiB) == rounded


def test_garbage_goes_until_enough_is_back() -> None:
    config = AllocatorConfig(garbage_collection_threshold=0.5)
    device = CachingAllocator(config, capacity_bytes=200 * MiB)
    old, middle, young = (device.malloc(size * MiB) for size in (30, 40, 50))
    assert old is not None
    assert middle is not None
    assert young is not None
    device.free(old)
    # cut from the 30, which is no whole segment any more
    assert device.malloc(2 * MiB) is not None
    device.free(middle)
    device.free(young)
    # 120 MiB are 20 more than half the card: of the two idle ones the smaller is enough
    assert device.reserved_bytes == 120 * MiB
    assert device.malloc(60 * MiB) is not None
    assert device.reserved_bytes == 120 * MiB - 40 * MiB + 60 * MiB


@pytest.mark.parametrize("text", ["roundup_power2_divisions:0", "roundup_power2_divisions:6"])
def test_divisions_are_powers_of_two_from_one_on(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        AllocatorConfig.parse(text)
    assert AllocatorConfig.parse("roundup_power2_divisions:1").roundup_power2_divisions == 1


def test_a_range_grows_at_its_end() -> None:
    pool = Pool(small=False, expandable=True)
    first = pool.expand(10 * MiB, None)
    assert first is not None
    first.free = False
    second = pool.expand(30 * MiB, None)
    assert second is not None
    # pages of 20 MiB: one, then two after it
    assert (first.address, first.size) == (0, 20 * MiB)
    assert (second.address, second.size) == (20 * MiB, 40 * MiB)


def test_the_least_capacity_is_what_was_never_idle() -> None:
    device = CachingAllocator()
    for size, needed in ((30, 30), (40, 40), (20, 40), (50, 50)):
        block = device.malloc(size * MiB)
        assert block is not None
        device.free(block)
        assert device.needed_bytes == needed * MiB


class Asked:
    """One request."""

    kind, block, bytes = "alloc", 0, MiB + 512
    op = module = phase = ""
    stream = 0


def test_fragmentation_of_nothing_is_none() -> None:
    assert replay([]).fragmentation == 0
    # 1 MiB + 512 of a segment of 20 MiB
    one = replay([Asked()])
    assert one.fragmentation == pytest.approx(1 - (MiB + 512) / (20 * MiB))


def test_streams_of_units_are_apart() -> None:
    assert len({0, GATHER, REDUCE, CAST}) == 4  # 0: the stream that computes


def test_garbage_is_what_has_waited_longest() -> None:
    config = AllocatorConfig(garbage_collection_threshold=0.5)
    device = CachingAllocator(config, capacity_bytes=100 * MiB)
    old, young = device.malloc(40 * MiB), device.malloc(22 * MiB)
    assert old is not None
    assert young is not None
    device.free(old)
    for _ in range(3):  # requests are its clock
        small = device.malloc(512)
        assert small is not None
        device.free(small)
    device.free(young)
    # 64 MiB with the small pool's 2 are 14 too much: the old 40 go, the smaller young one stays
    assert device.malloc(41 * MiB) is not None
    assert device.reserved_bytes == (22 + 2 + 42) * MiB

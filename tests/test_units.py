"""Sizes, durations, times and names: what people write, and what they read."""

import pytest

from pipectl import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024), ("4GiB", 4 * 2**30), ("512 MB", 512 * 10**6), ("1.5k", 1536),
        (" 2 tib ", 2**41), ("64Gi", 2**36), ("0", 0),
    ],
)  # fmt: skip
def test_a_size_has_binary_or_decimal_units(text, size):
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4 GiBs", "-1", "GiB", "1e3", "9" * 400])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (10 * 2**20, "10.0 MiB"),
        (438 * 2**20, "438 MiB"), (1.5 * 2**30, "1.50 GiB"), (2**50, "1024 TiB"),
    ],
)  # fmt: skip
def test_a_size_is_shown_with_three_digits(size, text):
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:30:00", 1800), ("2-12:00:00", 216_000), ("100:00:00", 360_000), ("3m", 180),
        ("1h30m", 5400), ("1d", 86_400), ("90", 90), (" 90s ", 90), ("1d12h", 129_600),
        ("1h30s", 3630), ("1m30", 90), ("30:00", 1800), ("90:30", 5430), ("2-12", 216_000),
        ("2-12:30", 217_800), ("0-100", 360_000), ("1:00:00.000", 3600), ("1:30.25", 91),
        ("90 minutes", 5400), ("2 days", 172_800), ("1 Hour 30 min", 5400), ("5min", 300),
    ],
)  # fmt: skip
def test_a_duration_is_a_clock_or_has_units(text, seconds):
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "", "00:60:00", "00:00:60", "0:60", "2-12:60", "-5", "1-", "1:", ":30", "1-2:3:4.5",
        "1:2:3:4", "1m1h", "soon", "1.5h", "1h30", "1d12",
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="is not a duration"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"), (2e-6, "2.00 us"), (0.0123, "12.3 ms"), (1.25, "1.25 s"),
        (0.9996, "1.00 s"), (9.996e-3, "10.0 ms"), (119.9, "120 s"), (185.0, "3 min 05 s"),
        (float("inf"), "inf s"),
    ],
)  # fmt: skip
def test_a_time_is_shown_with_three_digits(seconds, text):
    assert units.format_time(seconds) == text


def test_a_name_is_short_and_begins_with_a_letter_or_digit():
    assert units.is_name("a" * 64)
    assert units.is_name("7.b_c-d")
    assert not any(map(units.is_name, ("", "a" * 65, "-a", ".a", "a b", "a/b", "ä", "a\n")))


def test_only_a_near_word_is_offered():
    known = ["stages", "schedule"]
    assert units.did_you_mean("stagse", known) == "; did you mean 'stages'?"
    assert units.did_you_mean("x", known) == ""


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "3"), ([0, 1, 2], "0-2"), ([5, 1, 0, 8, 9], "0-1, 5, 8-9"), ([2, 2], "2"), ([], "")],
)
def test_neighbouring_numbers_are_put_together(numbers, text):
    assert units.format_ranges(numbers) == text
    assert units.format_ranges(numbers, ",") == text.replace(" ", "")

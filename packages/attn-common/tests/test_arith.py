import pytest
from attn_common import cdiv, is_power_of_2, next_power_of_2, round_up

HUGE = 2**70 + 1  # beyond any float, where a division that is not exact would show


@pytest.mark.parametrize("a", [-9, -8, -1, 0, 1, 7, 8, 9, 2**53 + 1, HUGE])
@pytest.mark.parametrize("b", [1, 2, 3, 8, 128])
def test_cdiv_is_the_least_count_that_covers(a, b):
    count = cdiv(a, b)
    assert count * b >= a > (count - 1) * b
    assert round_up(a, b) == count * b


@pytest.mark.parametrize("n", [*range(1, 70), 2**31, 2**31 + 1, HUGE])
def test_next_power_of_2_is_the_least_one(n):
    power = next_power_of_2(n)
    assert power >= n > power // 2
    assert bin(power).count("1") == 1
    assert is_power_of_2(power)
    assert is_power_of_2(n) == (power == n)


@pytest.mark.parametrize("n", [0, -1, -2, -8, -HUGE])
def test_nothing_below_one_is_a_power_of_2(n):
    assert not is_power_of_2(n)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cdiv(1, 0), "cdiv: b must be at least 1, got 0"),
        (lambda: cdiv(1, -2), "cdiv: b must be at least 1, got -2"),
        (lambda: round_up(1, 0), "round_up: multiple must be at least 1, got 0"),
        (lambda: next_power_of_2(0), "next_power_of_2: n must be at least 1, got 0"),
        (lambda: next_power_of_2(-4), "next_power_of_2: n must be at least 1, got -4"),
    ],
)
def test_errors_name_the_argument_and_what_came(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cdiv(5.5, 2), "cdiv: a must be an int, got float"),
        (lambda: cdiv(5, 2.0), "cdiv: b must be an int, got float"),
        (lambda: round_up(5.0, 2), "round_up: n must be an int, got float"),
        (lambda: round_up(5, "2"), "round_up: multiple must be an int, got str"),
        (lambda: next_power_of_2(5.5), "next_power_of_2: n must be an int, got float"),
        (lambda: is_power_of_2(4.0), "is_power_of_2: n must be an int, got float"),
        (lambda: is_power_of_2(None), "is_power_of_2: n must be an int, got NoneType"),
    ],
)
def test_what_is_no_integer_is_refused(call, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        call()

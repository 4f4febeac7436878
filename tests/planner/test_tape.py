"""The byte tape follows autograd's rules of who holds what, and when it is freed."""

from planner.layer.tape import Point, Tape, envelope, largest


def test_a_saved_tensor_outlives_its_variable() -> None:
    tape = Tape()
    x = tape.value(10)
    y = tape.op((x,), 20, saves=(x,))
    tape.drop(x)
    assert tape.live == 30
    tape.drop(y)
    assert tape.live == 10


def test_without_gradients_nothing_is_kept() -> None:
    tape = Tape(grad_enabled=False)
    x = tape.value(10)
    y = tape.op((x,), 20, saves=(x,))
    tape.drop(x, y)
    assert tape.live == 0
    assert tape.nodes == []


def test_backward_frees_what_the_node_saved() -> None:
    tape = Tape()
    x = tape.value(10)
    y = tape.op((x,), 20, saves=(x,))
    tape.drop(x, y)
    tape.start_backward(y, 20)
    tape.run()
    assert tape.live == 10  # the gradient of x is all that is left
    assert max(point.per_token for point in tape.points) == 10 + 20 + 10


def test_two_uses_accumulate_in_place() -> None:
    tape = Tape()
    x = tape.value(8)
    left, right = tape.op((x,), 8), tape.op((x,), 8)
    total = tape.add(left, right, 8)
    tape.drop(x, left, right, total)
    tape.points.clear()
    tape.start_backward(total, 8)
    tape.run()
    assert tape.live == 8
    assert max(point.per_token for point in tape.points) == 24  # incoming, old and new


def test_a_view_is_never_added_to_in_place() -> None:
    tape = Tape()
    x = tape.value(8)
    left, right = tape.op((x,), 4, view_grad=True), tape.op((x,), 4, view_grad=True)
    total = tape.op((left, right), 4)
    tape.drop(x, left, right, total)
    tape.points.clear()
    tape.start_backward(total, 4)
    tape.run()
    # both gradients of x and their sum at once
    assert max(point.per_token for point in tape.points) == 24
    assert tape.live == 8


def test_split_parts_share_one_gradient_buffer() -> None:
    tape = Tape()
    both = tape.op((tape.value(2),), 10)
    first, second = tape.split(both, (6, 4))
    tape.drop(both)
    out = tape.op((first, second), 3, saves=(first, second))
    tape.drop(first, second, out)
    assert tape.live == 12  # the input and the one shared storage
    tape.start_backward(out, 3)
    tape.points.clear()
    tape.run()
    # x, the storage, the gradient that came in and those of both parts; then x and two buffers
    assert max(point.per_token for point in tape.points) == max(2 + 10 + 3 + 10, 2 + 10 + 10)


def test_weight_gradients_are_counted_apart_and_can_be_accumulated() -> None:
    for keep, expected in ((True, 100), (False, 0)):
        tape = Tape(keep_weight_grads=keep)
        x = tape.value(4)
        y = tape.op((x,), 4, saves=(x,), weight_grad=100)
        tape.drop(y)
        tape.start_backward(y, 4)
        tape.run()
        assert tape.live_grads == expected
        assert max(point.weight_grads for point in tape.points) == 100


def test_recompute_stops_at_the_last_saved_tensor() -> None:
    tape = Tape()
    x = tape.value(4)
    middle = tape.op((x,), 4, saves=(x,))
    before = len(tape.points)
    saved_last = tape.op((middle,), 4, saves=(middle,))
    tape.op((saved_last,), 400)
    assert tape.last_save == before


def test_envelope_keeps_only_points_that_can_win() -> None:
    points = [Point(10, 0, 0), Point(5, 100, 0), Point(4, 90, 5), Point(1, 0, 200), Point(9, 0, 0)]
    kept = envelope(points)
    assert kept == (Point(10, 0, 0), Point(5, 100, 0), Point(1, 0, 200))
    assert largest(kept, 1).total(1) == 201
    assert largest(kept, 24).total(24) == 240
    for tokens in (1, 7, 20, 1000):
        best = max(point.total(tokens) for point in points)
        assert largest(kept, tokens).total(tokens) == best

"""Offsets, layouts, padding, buckets and the tile schedule."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import configs
from kernels._buckets import plan_buckets
from kernels._jagged import layout_of, lengths_of, pad, row_ids, unpad, validate_offsets
from kernels.schedule import attention_tiles, loads, slot_of, worker_of
from kernels.testing import offsets_of

lengths_lists = st.lists(st.integers(0, 40), max_size=8)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([0.0, 1.0], TypeError, r"my_offsets: expected dtype torch.int64, found torch.float32"),
        ([[0, 1]], ValueError, r"my_offsets: expected shape \[B\+1\] with B >= 0, found \[1, 2\]"),
        ([], TypeError, "my_offsets: expected dtype torch.int64"),
        ([1, 2], ValueError, "my_offsets: row 0 starts at 1, expected 0"),
        ([0, 3, 2, 5], ValueError, "my_offsets: row 1 ends at 2, expected at least its start 3"),
        ([0, 3, 11], ValueError, "my_offsets: row 1 ends at 11, expected at most 10"),
    ],
)
def test_malformed_offsets_are_refused_with_name_row_expected_and_found(
    values: list[float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        validate_offsets(torch.tensor(values), 10, name="my_offsets")


def test_int32_offsets_and_no_offsets_are_refused() -> None:
    with pytest.raises(TypeError, match="found torch.int32"):
        validate_offsets(torch.tensor([0, 1], dtype=torch.int32), 10)
    with pytest.raises(ValueError, match=r"found \[0\]"):
        validate_offsets(torch.zeros(0, dtype=torch.int64), 10)


def test_offsets_are_read_again_after_a_write() -> None:
    offsets = offsets_of([2, 3])
    assert layout_of(offsets, 5) is layout_of(offsets, 9)
    offsets[1] = 4
    assert layout_of(offsets, 5).lengths.tolist() == [4, 1]
    offsets[2] = 3
    with pytest.raises(ValueError, match="row 1 ends at 3, expected at least its start 4"):
        layout_of(offsets, 5)


def test_layouts_die_with_their_offsets() -> None:
    offsets = offsets_of([2, 3])
    layout = layout_of(offsets, 5)
    attention_tiles(layout, layout, 2, 2)
    plan_buckets(layout, layout)
    alive = weakref.ref(layout)
    gc.disable()
    try:
        del offsets, layout
        assert alive() is None
    finally:
        gc.enable()


def test_a_layout_first_seen_in_inference_mode_still_trains() -> None:
    offsets, x = offsets_of([2, 0, 1]), torch.randn(3, 2, requires_grad=True)
    with torch.inference_mode():
        pad(x, offsets)
    pad(x, offsets)[0].square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


@settings(derandomize=True, deadline=None)
@given(lengths_lists, st.integers(0, 3))
def test_unpad_inverts_pad(lengths: list[int], tail: int) -> None:
    offsets, total = offsets_of(lengths), sum(lengths)
    x = torch.randn(total + tail, 2)
    dense, mask = pad(x, offsets)
    assert dense.shape[:2] == mask.shape == (len(lengths), max([1, *lengths]))
    assert mask.sum(1).tolist() == lengths == lengths_of(offsets).tolist()
    assert not dense[~mask].any()
    assert torch.equal(dense[mask], x[:total])
    back = unpad(dense, offsets, total + tail)
    assert torch.equal(back[:total], x[:total])
    assert not back[total:].any()
    expected_rows = [b for b, n in enumerate(lengths) for _ in range(n)] + [-1] * tail
    assert row_ids(offsets, total + tail).tolist() == expected_rows


def test_unpad_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"x_BL: expected leading shape \[2, 3\], found \[2, 4\]"):
        unpad(torch.zeros(2, 4, 1), offsets_of([3, 1]))


def test_pad_and_unpad_pass_a_numerical_gradient_check_twice() -> None:
    offsets = offsets_of([2, 0, 3])
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: unpad(pad(x, offsets)[0].sin(), offsets, 6), x)


@settings(derandomize=True, deadline=None)
@given(lengths_lists, st.integers(1, 9))
def test_blocks_cut_rows_into_runs_that_restart_with_each_row(lengths: list[int], size: int) -> None:
    blocks = layout_of(offsets_of(lengths), 10**6).blocks(size)
    expected = [(b, s, min(size, n - s)) for b, n in enumerate(lengths) for s in range(0, n, size)]
    found = zip(blocks.parent_row.tolist(), blocks.parent_start.tolist(), blocks.lengths.tolist(), strict=True)
    assert list(found) == expected
    assert blocks.offsets[-1] == sum(lengths)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8))
def test_buckets_hold_every_row_with_work_once_in_less_room(pairs: list[tuple[int, int]]) -> None:
    own, other = (layout_of(offsets_of([p[i] for p in pairs]), 10**6) for i in (0, 1))
    plan = plan_buckets(own, other)
    if plan.is_whole:
        return
    rows = sorted(r for bucket in plan.buckets for r in bucket.rows.tolist())
    assert rows == [i for i, (n, m) in enumerate(pairs) if n and m]
    area = sum(len(b.rows) * b.own.max_len * b.other.max_len for b in plan.buckets)
    assert area <= 0.7 * len(pairs) * own.max_len * other.max_len
    x = torch.randn(own.total + 2, 3)
    back = plan.own.unpad(plan.own.pad(x), own.total + 2)
    worked = torch.cat([torch.full((n,), bool(n and m)) for n, m in pairs] + [torch.zeros(2, dtype=torch.bool)])
    assert torch.equal(back[worked], x[worked])
    assert not back[~worked].any()


def test_skewed_lengths_are_bucketed_and_equal_ones_are_not() -> None:
    skewed = layout_of(offsets_of([100, 3, 2, 1, 0, 0, 5]), 10**6)
    assert len(plan_buckets(skewed, skewed).buckets) == 2
    equal = layout_of(offsets_of([4, 4, 4]), 10**6)
    assert plan_buckets(equal, equal).is_whole


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5),
    st.booleans(),
    st.none() | st.integers(0, 9),
    st.booleans(),
)
def test_tiles_cover_every_entry_once_and_weigh_at_least_what_they_read(
    pairs: list[tuple[int, int]], causal: bool, window: int | None, own_is_keys: bool
) -> None:
    size, step = 4, 3
    own, other = (layout_of(offsets_of([p[i] for p in pairs]), 10**6) for i in (0, 1))
    tiles = attention_tiles(own, other, size, step, causal=causal, window=window, own_is_keys=own_is_keys)
    work = tiles.work.tolist()
    assert work == sorted(work, reverse=True)
    covered = []
    for row, start, weight in zip(tiles.row.tolist(), tiles.start.tolist(), work, strict=True):
        n, m = pairs[row]
        mine = range(start, min(start + size, n))
        covered += [(row, i) for i in mine]
        # Count by the definition how many entries of the other side any entry of the tile reads.
        shift = (n - m) if own_is_keys else (m - n)
        read = set()
        for i in mine:
            for j in range(m):
                distance = (j + shift - i) if own_is_keys else (i + shift - j)
                if (not causal or distance >= 0) and (window is None or abs(distance) <= window):
                    read.add(j)
        assert weight * step >= len(read)
        if window is None and read:
            assert weight == -(-len(read) // step)
    assert sorted(covered) == [(b, i) for b, (n, _) in enumerate(pairs) for i in range(n)]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 9))
def test_zigzag_loads_differ_by_at_most_one_tile(work: list[int], num_workers: int) -> None:
    sorted_work = torch.tensor(sorted(work, reverse=True), dtype=torch.int64)
    spread = loads(sorted_work, num_workers)
    assert int(spread.sum()) == sum(work)
    assert int(spread.max() - spread.min()) <= max(work, default=0)


def test_zigzag_beats_dealing_in_row_order_on_skewed_lengths() -> None:
    lengths = (
        torch.randn(256, generator=torch.Generator().manual_seed(0)).mul(1.2).exp().mul(100).long().clamp(max=2000)
    )
    layout = layout_of(offsets_of(lengths.tolist()), int(lengths.sum()))
    tiles = attention_tiles(layout, layout, 64, 64)
    blocks = layout.blocks(64)
    work = (layout.lengths[blocks.parent_row] + 63) // 64
    num_workers = 32
    dealt = torch.zeros(num_workers, dtype=torch.int64).index_add(0, torch.arange(tiles.num) % num_workers, work)
    mean = float(work.sum()) / num_workers
    excess = float(dealt.max()) / mean - 1.0
    assert excess > 0.1
    assert float(loads(tiles.work, num_workers).max()) / mean - 1.0 < excess / 3


@pytest.mark.parametrize(("num_tiles", "num_workers"), [(0, 3), (1, 3), (7, 3), (12, 4)])
def test_kernels_and_schedule_agree_on_the_slots(num_tiles: int, num_workers: int) -> None:
    owner = worker_of(num_tiles, num_workers).tolist()
    rounds = -(-num_tiles // num_workers)
    walked = {
        w: [s for r in range(rounds) if (s := slot_of(r, w, num_workers)) < num_tiles] for w in range(num_workers)
    }
    assert {w: [i for i, x in enumerate(owner) if x == w] for w in range(num_workers)} == {
        w: sorted(slots) for w, slots in walked.items()
    }


def test_configurations_exist_for_every_job_and_fit_short_rows() -> None:
    for job in ("forward", "backward", "block", "fused", "fused_backward", "gemm"):
        for kind in ((8, 0), (9, 0), (10, 0), (12, 1)):
            for width, size in ((64, 2), (128, 2), (64, 4)):
                assert configs.select(job, width, size, kind).own >= 16
    assert configs.Config(128, 64).fit(17, 0) == configs.Config(32, 16)
    with pytest.raises(KeyError):
        configs.select("sideways", 64, 2, (9, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what happens without a GPU")
def test_tuning_is_refused_without_a_gpu() -> None:
    with pytest.raises(RuntimeError, match="expected a CUDA device, found none"):
        configs.tune([configs.Config()], lambda _: None)

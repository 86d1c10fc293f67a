"""Attention of one query per hypothesis, in decoding: rows by index, packed rows, parents."""
import numpy as np
import pytest
from places import on_the_cpu

from pyops import backend
from pyops.ops import Attention
from pyops.ops.attention import append_rows, follow_parents
from pyops.ops.packed import Packed

pytestmark = on_the_cpu


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize('R,T,W,M,heads,C', [(1, 1, 1, 0, 1, 1), (3, 5, 4, 0, 2, 7), (6, 9, 6, 4, 4, 16), (2, 3, 2, 3, 1, 130),
                                             (10, 40, 12, 39, 2, 70)])
def test_a_hypothesis_attends_to_the_rows_of_its_tokens(R, T, W, M, heads, C):
    D, op = heads * C, Attention(heads)
    q, k, v = normal(R, D), normal(T + 2, W, D, seed=1), normal(T + 2, W, D, seed=2)
    index = np.random.default_rng(3).integers(0, W, (M, R)).astype(np.int32) if M else None
    rows = np.arange(R)[None].repeat(T, 0)
    if M:
        rows[:M] = index
    y = op.step(q, k, v, T, index)
    own = [x[np.arange(T)[:, None], rows] for x in (k, v)]                       # (T, R, D)
    want = Attention.reference(q[None].astype('d'), *(x.astype('d') for x in own), heads=heads)[0]
    assert np.abs(y - want).max() <= 1e-5
    for r in range(R):                                                          # the same bits alone
        alone = None if index is None else np.ascontiguousarray(index[:, r:r + 1])
        if W == R and index is None:
            one = op.step(q[r:r + 1], *(np.ascontiguousarray(x[:, r:r + 1]) for x in (k, v)), T)
        elif M == T:
            one = op.step(q[r:r + 1], k, v, T, alone)
        else:
            continue
        assert one.tobytes() == y[r:r + 1].tobytes()


@pytest.mark.parametrize('lengths', [[1], [3, 0, 7, 2], [20, 1, 33]])
def test_a_hypothesis_attends_to_its_own_source(lengths):
    B, beam, heads, D = len(lengths), 3, 2, 24
    rows = Packed(np.cumsum([0, *lengths], dtype=np.int32), max(lengths))
    q, k, v = normal(beam * B, D), normal(sum(lengths), D, seed=1), normal(sum(lengths), D, seed=2)
    y = Attention(heads).step(q, k, v, rows=rows)
    want = Attention.reference(q.reshape(beam, B, D).astype('d'), k.astype('d'), v.astype('d'), k_rows=rows, heads=heads)
    assert np.abs(y - want.reshape(-1, D)).max() <= 1e-5
    assert (y.reshape(beam, B, D)[:, np.array(lengths) == 0] == 0).all()


def test_a_hypothesis_attends_to_the_source_that_an_index_names():
    lengths, index, beam, D = [3, 5, 1, 7], np.array([3, 0], 'i'), 3, 24
    starts, op = np.cumsum([0, *lengths], dtype=np.int32), Attention(2)
    q, k, v = normal(beam * 2, D), normal(16, D, seed=1), normal(16, D, seed=2)
    kept = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in index])
    want = op.step(q, k[kept], v[kept], rows=Packed(np.array([0, 7, 10], 'i'), 7))
    assert op.step(q, k, v, index=index, rows=Packed(starts, 7)).tobytes() == want.tobytes()


@pytest.mark.parametrize('R,T,heads,C', [(1, 1, 1, 4), (5, 5, 2, 16), (3, 9, 4, 7), (20, 33, 2, 64)])
def test_successive_tokens_have_the_bits_of_a_step_for_each(R, T, heads, C):
    q, op = normal(R, heads * C), Attention(heads)
    k, v = normal(T + 3, 1, heads * C, seed=1), normal(T + 3, 1, heads * C, seed=2)
    y = op.step(q, k, v, T, causal=True)
    for r in range(R):
        assert op.step(q[r:r + 1], k, v, T - R + r + 1).tobytes() == y[r:r + 1].tobytes()


def test_successive_tokens_are_those_of_one_hypothesis_and_at_most_as_many_as_keys():
    k = normal(3, 2, 8)
    for wide, R, text in ((2, 2, 'W=2 with causal, expected W=1 without index and offsets'),
                          (1, 4, r'R=4 W=1 M=0 T=3, expected R of at most W \(with causal T\)')):
        with pytest.raises(ValueError, match=text):
            Attention(1).step(normal(R, 8), k[:, :wide].copy(), k[:, :wide].copy(), 3, causal=True)


def test_queries_keys_and_values_may_be_columns_of_one_array():
    all_three = normal(6, 5, 3 * 24)
    q, k, v = all_three[5, :, :24], all_three[..., 24:48], all_three[..., 48:]
    index, op = np.random.default_rng(0).integers(0, 5, (3, 5)).astype(np.int32), Attention(2)
    assert op.step(q, k, v, 6, index).tobytes() == op.step(q.copy(), k.copy(), v.copy(), 6, index).tobytes()
    rows = Packed(np.array([0, 2, 6], 'i'), 4)
    assert (op.step(q[:4], k[0, :, :].repeat(2, 0)[:6], v[0].repeat(2, 0)[:6], rows=rows) == op.step(
        np.ascontiguousarray(q[:4]), k[0].repeat(2, 0)[:6].copy(), v[0].repeat(2, 0)[:6].copy(), rows=rows)).all()


def test_a_nan_in_a_key_makes_only_its_own_hypothesis_nan():
    k = normal(3, 2, 8)
    k[1, 0, 5] = np.nan
    y = Attention(1).step(normal(2, 8), k, normal(3, 2, 8), 3)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()


def test_hypotheses_with_different_numbers_of_tokens_have_the_bits_of_a_step_for_each():
    """Their keys and values are in any rows, which append_rows() fills."""
    T, W, D, op, positions = 5, 4, 24, Attention(2), np.array([2, 0, 4], 'i')
    q, k, v = normal(3, D), normal(T, 3, D, seed=1), normal(T, 3, D, seed=2)
    index = np.random.default_rng(0).permutation(T * W).reshape(T, W).astype('i')
    both = np.full((T, W, 2 * D), np.nan, 'f')
    for s in range(T):
        for columns, x in ((both[..., :D], k), (both[..., D:], v)):
            append_rows(columns, x[s], index[s, :3].copy())
    y = op.step(q, both[..., :D], both[..., D:], T, index, positions=positions)
    for r, position in enumerate(positions):
        own = (np.ascontiguousarray(x[:, r:r + 1]) for x in (k, v))
        assert op.step(q[r:r + 1], *own, position + 1).tobytes() == y[r:r + 1].tobytes()
    assert np.isnan(both).sum() == T * 2 * D


def test_threads_change_no_bit():
    q, k, v, before, results = normal(300, 64), normal(30, 300, 64), normal(30, 300, 64), backend.threads(), []
    try:
        for threads in (1, 3):
            backend.set_threads(threads)
            results.append(Attention(4).step(q, k, v, 30).tobytes())
    finally:
        backend.set_threads(before)
    assert results[0] == results[1]


def test_the_rows_of_a_hypothesis_follow_its_parents():
    """A search by hand: each hypothesis is a list of the rows that its tokens were written to."""
    rng, R = np.random.default_rng(0), 4
    index, rows, N = None, [[] for _ in range(2)], 2
    for t in range(1, 7):
        rows = [[*some, r] for r, some in enumerate(rows)]                      # token t - 1 of hypothesis r is row r
        parents = rng.integers(0, N, R).astype(np.int32)
        index, N, rows = follow_parents(index, parents, t, N), R, [rows[p] for p in parents]
        assert index.T.tolist() == rows
        if t == 3:                                                              # two tokens without a choice
            rows = [[*some, r, r] for r, some in enumerate(rows)]
            parents = np.array([3, 3, 0, 1], np.int32)
            index, rows = follow_parents(index, parents, 5, N), [rows[p] for p in parents]
            assert index.T.tolist() == rows
            break


@pytest.mark.parametrize('arguments,text', [
    ((4, None), 'tokens: expected 1 to 3, got 4'), ((0, None), 'tokens: expected 1 to 3, got 0'),
    ((3, np.full((1, 2), 2, 'i')), r'attention_step: ids\[0\]=2, expected 0 to 1'),
    ((1, np.zeros((2, 2), 'i')), 'M=2 T=1, expected .* M from 0 to T')])
def test_rows_out_of_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Attention(1).step(normal(2, 8), normal(3, 2, 8), normal(3, 2, 8), *arguments)


def test_sources_out_of_range_are_refused():
    rows = Packed(np.array([0, 2, 3], 'i'), 2)
    for index, text in ((np.array([0, 2], 'i'), r'attention_step: ids\[1\]=2, expected 0 to 1'),
                        (np.zeros(3, 'i'), 'R=2 B=3 with offsets, expected R a multiple of B'),
                        (np.zeros((1, 2), 'i'), r'index: expected shape \(1,\), got \(1, 2\)')):
        with pytest.raises(ValueError, match=text):
            Attention(1).step(normal(2, 8), normal(3, 8), normal(3, 8), index=index, rows=rows)


def test_parents_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r'follow_parents: ids\[1\]=3, expected 0 to 2'):
        follow_parents(None, np.array([0, 3], 'i'), 1, 3)

"""GRU and EmbeddingGRU on packed rows, compared with padded sequences, the float64 reference and PyTorch."""
import numpy as np
import pytest
from arrays import close, normal, parameter, same
from places import ON_GPU, get, of_threads, on_the_cpu, put

from pyops import backend
from pyops.ops import GRU, EmbeddingGRU
from pyops.ops.packed import Packed, pad_rows, unpad_rows
from pyops.quantization import Recipe

LENGTHS = [(4, 2, 0, 3, 4, 1, 1), (0, 0, 1, 0, 0), (0, 0, 0, 0), (3, 3, 3, 3), (2,), (1, 1, 1), (0, 5, 1)]
CASES = [pytest.param(before, h0, lengths, id=f'{"before" if before else "after"}-{"h0" if h0 else "zeros"}-{lengths}')
         for before in (False, True) for h0 in (True, False) for lengths in LENGTHS]
V, E, C = 9, 6, 3
STATES = ('h', 'last', 'd x', 'd h0')


class Case:
    """Parameters and inputs of a GRU on random sentences.  tokens: of an EmbeddingGRU with a context."""

    def __init__(self, lengths, I=7, H=10, reset_before=False, h0=True, tokens=False, longest=6):
        rng = np.random.default_rng(3)
        self.lengths, self.B, self.N, self.H = np.array(lengths, np.int32), len(lengths), sum(lengths), H
        self.T = max(longest, *lengths)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        self.reset_before = reset_before
        I = E + C if tokens else I
        table = dict(table=normal(rng, V, E)) if tokens else {}
        self.params = table | dict(w_ih=normal(rng, 3 * H, I, scale=H ** -0.5), w_hh=normal(rng, 3 * H, H, scale=H ** -0.5),
                                   b_ih=normal(rng, 3 * H), b_hh=normal(rng, 3 * H))
        self.x = rng.integers(0, V, self.N).astype(np.int32) if tokens else normal(rng, self.N, I)
        self.inputs = dict(context=normal(rng, self.B, C)) if tokens else {}
        self.inputs |= dict(h0=normal(rng, self.B, H)) if h0 else {}
        self.dh, self.dlast = normal(rng, self.N, H), normal(rng, self.B, H)
        self.at = [(t, b) for b, length in enumerate(lengths) for t in range(length)]       # step and sentence of each row

    def op(self, **recipe):
        op = EmbeddingGRU if 'table' in self.params else GRU
        op = op.rounded() if recipe else op
        return op(**{name: parameter(name, value) for name, value in self.params.items()}, reset_before=self.reset_before,
                  **recipe)

    def padded(self, rows):
        """Return rows (N, ...) as (T, B, ...) with zeros after the end of each sentence."""
        y = np.zeros((self.T, self.B, *rows.shape[1:]), rows.dtype)
        for row, at in zip(rows, self.at, strict=True):
            y[at] = row
        return y

    def packed(self, array):
        return np.array([array[at] for at in self.at], array.dtype).reshape(self.N, *array.shape[2:])

    def flipped(self, rows):
        """Return the rows with each sentence reversed."""
        parts = [rows[start:end][::-1] for start, end in zip(self.offsets, self.offsets[1:], strict=False)]
        return np.ascontiguousarray(np.concatenate(parts))

    def run(self, op=None, rows=True, reverse=False, x=None, dh=None):
        """Return h, last and all gradients by name."""
        op = op or self.op()
        placed = {name: put(value) for name, value in self.inputs.items()}
        x, dh = (self.x if x is None else x), (self.dh if dh is None else dh)
        if rows:
            h, ctx = op.forward(put(x), **placed, rows=Packed(put(self.offsets), self.T), reverse=reverse)
            result = op.backward(put(dh), ctx, put(self.dlast))
            h, last = get(h), get(ctx.last)
        else:
            h, ctx = op.forward(put(self.padded(x)), **placed, lengths=put(self.lengths))
            h = get(h)
            states = np.concatenate([self.inputs.get('h0', np.zeros((self.B, self.H), np.float32))[None], h])
            last = states[self.lengths, range(self.B)]
            dh = self.padded(dh)
            for b, length in enumerate(self.lengths):
                if length:
                    dh[length - 1, b] += self.dlast[b]
            result = op.backward(put(dh), ctx)
        names = ('x', 'context', 'h0') if isinstance(op, EmbeddingGRU) else ('x', 'h0')
        grads = {f'd {name}': get(value).copy() for name, value in zip(names, result, strict=True) if value is not None}
        grads |= {f'd {name}': get(getattr(op, name).grad).copy() for name in self.params}
        return dict(h=h, last=last) | grads


@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
@pytest.mark.parametrize('reset_before,h0,lengths', CASES)
def test_packed_rows_give_the_bits_of_padded_sequences_with_lengths(reset_before, h0, lengths, tokens):
    """On a GPU the weight gradients are summed in another order."""
    case = Case(lengths, reset_before=reset_before, h0=h0, tokens=tokens)
    got, want = case.run(), case.run(rows=False)
    want['h'] = case.packed(want['h'])
    if not tokens:
        want['d x'] = case.packed(want['d x'])
    if h0:                              # the last state of an empty sentence is h0
        want['d h0'][case.lengths == 0] = case.dlast[case.lengths == 0]
    assert got.keys() == want.keys()
    for name, value in want.items():
        # with tokens, padding is a further token, which may change the order of sums
        exact = not tokens and (not ON_GPU or name in STATES)
        same(got[name], value, name) if exact else close(got[name], value, 1e-5, name)


@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
@pytest.mark.parametrize('reset_before,h0,lengths', CASES)
def test_a_reversed_gru_reads_each_sentence_from_its_end(reset_before, h0, lengths, tokens):
    """It gives the bits of rows flipped by hand.  On a GPU the weight gradients are summed in another order."""
    case = Case(lengths, reset_before=reset_before, h0=h0, tokens=tokens)
    got, want = case.run(reverse=True), case.run(x=case.flipped(case.x), dh=case.flipped(case.dh))
    want['h'] = case.flipped(want['h'])
    if not tokens:
        want['d x'] = case.flipped(want['d x'])
    for name, value in want.items():
        exact = not tokens and (not ON_GPU or name in STATES)
        same(got[name], value, name) if exact else close(got[name], value, 1e-5, name)


def central_differences(f, value, eps=1e-6):
    grad = np.empty(value.shape)
    for i in np.ndindex(value.shape):
        kept = value[i]
        value[i] = kept + eps
        above = f()
        value[i] = kept - eps
        grad[i] = (above - f()) / (2 * eps)
        value[i] = kept
    return grad


@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
@pytest.mark.parametrize('reverse', [False, True], ids=['forward', 'reverse'])
@pytest.mark.parametrize('reset_before', [False, True], ids=['after', 'before'])
def test_gradients_of_a_packed_gru_are_central_differences_of_its_reference(reset_before, reverse, tokens):
    case = Case((3, 0, 1, 2), I=3, H=4, reset_before=reset_before, tokens=tokens)
    got, op = case.run(reverse=reverse), case.op()
    values = {name: value.astype(np.float64) for name, value in (case.inputs | case.params).items()}
    x = case.x if tokens else case.x.astype(np.float64)

    def outputs():
        h = op.reference(x, rows=Packed(case.offsets, case.T), reverse=reverse, reset_before=reset_before, **values)
        last = values['h0'].copy()
        for b in np.flatnonzero(case.lengths):
            last[b] = h[case.offsets[b] if reverse else case.offsets[b + 1] - 1]
        return h, last

    def loss():
        h, last = outputs()
        return (h * case.dh).sum() + (last * case.dlast).sum()
    close(got['h'], outputs()[0], 1e-6, 'h')
    close(got['last'], outputs()[1], 1e-6, 'last')
    for name, value in values.items() if tokens else (values | dict(x=x)).items():
        close(got[f'd {name}'], central_differences(loss, value), 2e-5, f'd {name}')


@pytest.mark.parametrize('reverse', [False, True], ids=['forward', 'reverse'])
@pytest.mark.parametrize('lengths', [(9, 1, 4, 4, 7, 2), (1,), (3, 8, 8)])
def test_a_packed_gru_is_pytorchs_on_a_packed_sequence(lengths, reverse):
    """Of a bidirectional nn.GRU, one direction."""
    torch = pytest.importorskip('torch', reason='compares with PyTorch: install torch')
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
    case = Case(lengths, I=12, H=33)
    got = case.run(reverse=reverse)
    twin = torch.nn.GRU(12, 33, bidirectional=True, dtype=torch.float64)
    suffix, side = ('_l0_reverse', 1) if reverse else ('_l0', 0)
    ours = {name: getattr(twin, dict(w_ih='weight_ih', w_hh='weight_hh', b_ih='bias_ih', b_hh='bias_hh')[name] + suffix)
            for name in case.params}
    with torch.no_grad():
        for name, value in ours.items():
            value.copy_(torch.tensor(case.params[name]))
    x = torch.tensor(case.padded(case.x), dtype=torch.float64, requires_grad=True)
    h0 = torch.zeros(2, case.B, 33, dtype=torch.float64)
    h0[side] = torch.tensor(case.inputs['h0'])
    h0.requires_grad_()
    y, last = twin(pack_padded_sequence(x, torch.tensor(case.lengths), enforce_sorted=False), h0)
    h = pad_packed_sequence(y)[0][..., side * 33:(side + 1) * 33]
    loss = (h * torch.tensor(case.padded(case.dh)[:len(h)])).sum() + (last[side] * torch.tensor(case.dlast)).sum()
    loss.backward()
    close(got['h'], case.packed(h.detach().numpy()), name='h')
    close(got['last'], last[side].detach().numpy(), name='last')
    close(got['d x'], case.packed(x.grad.numpy()), name='d x')
    close(got['d h0'], h0.grad[side].numpy(), name='d h0')
    for name, value in ours.items():
        close(got[f'd {name}'], value.grad.numpy(), name=f'd {name}')


@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
@pytest.mark.parametrize('reverse', [False, True], ids=['forward', 'reverse'])
@pytest.mark.parametrize('reset_before,h0,lengths', CASES)
def test_a_packed_gru_with_a_recipe_that_rounds_nothing_is_the_packed_gru(reset_before, h0, lengths, reverse, tokens):
    """It pads the rows and runs the products step by step."""
    case = Case(lengths, reset_before=reset_before, h0=h0, tokens=tokens)
    got, want = case.run(case.op(recipe=Recipe()), reverse=reverse), case.run(reverse=reverse)
    for name, value in want.items():
        close(got[name], value, 1e-5, name)


def test_padding_and_unpadding_rows_are_gradients_of_each_other():
    case, rng = Case((3, 0, 1, 4)), np.random.default_rng(0)
    rows, y = Packed(put(case.offsets), case.T), normal(rng, case.T, case.B, case.H)
    first, dfirst = normal(rng, case.B, case.H), normal(rng, case.B, case.H)
    for reverse in (False, True):
        x, last = (get(a) for a in unpad_rows(put(y), rows, case.N, reverse, put(first)))
        same(x, case.flipped(case.packed(y)) if reverse else case.packed(y))
        same(last[1], first[1])
        padded, empty = (get(a) for a in pad_rows(put(case.dh), rows, case.dh.shape, reverse, put(case.dlast)))
        product = (x * case.dh).sum() + (last * case.dlast).sum()
        close(np.array((padded * y).sum() + (empty * first).sum()), product, 1e-5)
        zeros, _ = pad_rows(None, rows, case.dh.shape, reverse, put(dfirst))
        assert (np.count_nonzero(get(zeros), (0, 2)) == np.minimum(case.lengths, 1) * case.H).all()


@of_threads
@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
@pytest.mark.parametrize('reset_before', [False, True], ids=['after', 'before'])
def test_a_packed_gru_gives_the_same_bits_for_any_number_of_threads(reset_before, tokens):
    rng, before, runs = np.random.default_rng(5), backend.threads(), []
    case = Case((0, 1, *rng.integers(0, 30, 60)), I=40, H=120, reset_before=reset_before, tokens=tokens)
    try:
        for threads in (1, 2, 5):
            backend.set_threads(threads)
            runs.append(case.run(reverse=True))
    finally:
        backend.set_threads(before)
    for run in runs[1:]:
        for name, value in run.items():
            same(value, runs[0][name], name)


@pytest.mark.parametrize('reset_before', [False, True], ids=['after', 'before'])
@pytest.mark.parametrize('size', [(3, 700), (150, 64)], ids=['wide', 'many'])
def test_packed_rows_of_large_grus_match_the_reference(size, reset_before):
    """The wide one has few sentences, the many belong to several teams of a GPU."""
    B, H = size
    rng = np.random.default_rng(7)
    case = Case((0, 1, *rng.integers(0, 8, B - 2)), I=16, H=H, reset_before=reset_before, longest=9)
    got, want = case.run(reverse=True), case.run(rows=False, x=case.flipped(case.x), dh=case.flipped(case.dh))
    close(got['h'], case.flipped(case.packed(want['h'])), 1e-5, 'h')
    close(got['d x'], case.flipped(case.packed(want['d x'])), 1e-5, 'd x')
    want['d h0'][case.lengths == 0] = case.dlast[case.lengths == 0]
    for name in ('last', 'd h0', 'd w_ih', 'd w_hh', 'd b_ih', 'd b_hh'):
        close(got[name], want[name], 1e-5, name)


@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
def test_the_launches_of_a_packed_gru_are_affine_in_its_sizes(tokens):
    """A plan records them at a few sizes and computes the scalars of all others."""
    def launches(lengths):
        found = []

        def listen(name, values):
            arrays = tuple(i for i, value in enumerate(values) if backend.is_array(value) or value is None)
            found.append((name, arrays, [int(value) for i, value in enumerate(values) if i not in arrays]))
            return True
        case = Case(lengths, tokens=tokens, longest=6)
        with backend.hooks(listen=listen):
            case.run()
        return found, np.array([1, case.N, case.B])

    runs = [launches(lengths) for lengths in ((3, 2), (4, 0, 1, 6), (5, 5, 1), (1, 1, 6, 2, 2), (2, 6))]
    outlines = [[(name, arrays) for name, arrays, _ in found] for found, _ in runs]
    assert all(outline == outlines[0] for outline in outlines)
    sizes = np.array([size for _, size in runs])
    for i in range(len(outlines[0])):
        scalars = np.array([found[i][2] for found, _ in runs])
        factors = np.linalg.lstsq(sizes, scalars, rcond=None)[0]
        np.testing.assert_allclose(sizes @ factors, scalars, atol=1e-6, err_msg=outlines[0][i][0])


def test_a_packed_gru_refuses_offsets_that_do_not_fit():
    case = Case((2, 3, 1), longest=4)

    def forward(offsets, longest=4, **named):
        return case.op().forward(put(case.x), rows=Packed(put(np.array(offsets, np.int32)), longest), **named)
    for offsets, text in (((1, 2, 5, 6), r'offsets\[0\]=1, expected 0'),
                          ((0, 3, 2, 6), r'offsets\[2\] - offsets\[1\]=-1, expected 0 to 4'),
                          ((0, 5, 5, 6), r'offsets\[1\] - offsets\[0\]=5, expected 0 to 4'),
                          ((0, 2, 5, 5), r'offsets\[3\]=5, expected the number of rows, 6')):
        with pytest.raises(ValueError, match=f'gru_forward: {text}'):
            forward(offsets)
    with pytest.raises(ValueError, match='N=6 T=1 B=3, expected N from 0 to'):
        forward((0, 2, 5, 6), longest=1)
    with pytest.raises(ValueError, match='lengths: expected None with rows'):
        forward((0, 2, 5, 6), lengths=put(case.lengths))
    with pytest.raises(ValueError, match='longest of at least 1'):
        forward((0, 2, 5, 6), longest=0)
    with pytest.raises(TypeError, match=r'rows.offsets: expected dtype int32'):
        case.op().forward(put(case.x), rows=Packed(put(case.x[0]), 4))
    with pytest.raises(ValueError, match='reverse: expected rows'):
        case.op().forward(put(case.padded(case.x)), reverse=True)


@on_the_cpu
@pytest.mark.parametrize('tokens', [False, True], ids=['rows', 'tokens'])
@pytest.mark.parametrize('reverse', [False, True], ids=['forward', 'reverse'])
@pytest.mark.parametrize('reset_before,h0,H', [(False, True, 10), (True, False, 40), (False, False, 40), (True, True, 10)])
def test_a_packed_gru_gives_the_same_results_on_a_gpu(reset_before, h0, H, reverse, tokens, device):
    """With empty sentences, also at the start and at the end of a team's rows."""
    case = Case((0, 3, 0, 6, 1, 0, 0, 5, 0, 0, 2, 0), H=H, reset_before=reset_before, h0=h0, tokens=tokens)
    want = case.run(reverse=reverse)
    with backend.on(device):
        got = case.run(reverse=reverse)
    assert got.keys() == want.keys()
    for name, value in want.items():
        close(got[name], value, 1e-5, name)


@on_the_cpu
@pytest.mark.parametrize('on_gpu', [False, True], ids=['cpu', 'gpu'])
@pytest.mark.parametrize('B,N', [(2, 0), (3, 66_000)])
def test_the_table_of_an_embedding_gru_has_its_gradient_for_any_number_of_tokens(B, N, on_gpu, device):
    """No token at all, and more than a GPU sorts at once."""
    rng, O, E, C, V = np.random.default_rng(1), 2, 2, 1, 5
    offsets = np.array([0, *sorted(rng.integers(0, N + 1, B - 1)), N], np.int32)
    ids, dy, table = rng.integers(0, V, N).astype(np.int32), normal(rng, N, O), normal(rng, V, E)
    context, weight, sizes = normal(rng, B, C), normal(rng, O, E + C), (max(N, 1), B, N, V, E, C, O)
    with backend.on(device if on_gpu else backend.HOST):
        gradients = [put(np.zeros(shape, np.float32)) for shape in ((V, E), (B, C), (O, E + C), (O,))]
        backend.launch('embedding_linear_backward', gradients[0], None, *gradients[1:],
                       *map(put, (dy, table, ids, context, offsets, weight)), backend.work('embedding_linear_backward', *sizes),
                       *sizes, O, 0)
        dtable, dcontext, dweight, dbias = map(get, gradients)
    wide, want, sums = dy.astype(np.float64), np.zeros((V, E)), np.zeros((B, O))
    np.add.at(want, ids, wide @ weight[:, :E])
    np.add.at(sums, np.repeat(np.arange(B), np.diff(offsets)), wide)
    close(dtable, want, 1e-5, 'dtable')
    close(dcontext, sums @ weight[:, E:], 1e-5, 'dcontext')
    close(dweight, np.concatenate([wide.T @ table[ids], sums.T @ context], 1), 1e-5, 'dweight')
    close(dbias, wide.sum(0), 1e-5, 'dbias')


@of_threads
def test_the_table_of_few_tokens_has_the_same_gradients_for_any_number_of_threads():
    """A product is large because of its columns and terms, and has too few rows to share."""
    rng, T, B, V, E, O = np.random.default_rng(2), 3, 2, 6, 1200, 1200
    ids, found, before = np.arange(T * B, dtype=np.int32), [], backend.threads()
    dy, table, weight, sizes = normal(rng, T * B, O), normal(rng, V, E), normal(rng, O, E), (T, B, 0, V, E, 0, O)
    try:
        for threads in (1, 2, 3):
            backend.set_threads(threads)
            dtable, dweight, dbias = (put(np.zeros(shape, np.float32)) for shape in ((V, E), (O, E), (O,)))
            backend.launch('embedding_linear_backward', dtable, None, None, dweight, dbias, *map(put, (dy, table, ids)), None,
                           None, put(weight), backend.work('embedding_linear_backward', *sizes), *sizes, O, 0)
            found.append([get(one).tobytes() for one in (dtable, dweight, dbias)])
    finally:
        backend.set_threads(before)
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.parametrize('recipe', [{}, dict(recipe=Recipe())], ids=['float32', 'rounded'])
@pytest.mark.parametrize('rows', [True, False], ids=['packed', 'padded'])
def test_the_gradient_of_a_context_is_added_to_an_existing_gradient(rows, recipe):
    case, found = Case((3, 0, 4, 1), tokens=True), []
    before = normal(np.random.default_rng(5), case.B, C)
    for into in (None, put(before.copy())):
        op = case.op(**recipe)
        x, lengths = (case.x, None) if rows else (case.padded(case.x), put(case.lengths))
        h, ctx = op.forward(put(x), put(case.inputs['context']), put(case.inputs['h0']), lengths,
                            Packed(put(case.offsets), case.T) if rows else None)
        dh = put(normal(np.random.default_rng(6), *h.shape))
        _, dcontext, dh0 = op.backward(dh, ctx, into=into)
        assert into is None or dcontext is into
        found.append([get(dh0), get(op.w_ih.grad), get(op.table.grad), get(dcontext)])
    for want, got in zip(*found, strict=True):
        close(got, want if got is not found[1][-1] else before + want, 1e-5)
    with pytest.raises(ValueError, match='into: expected shape'):
        op.backward(dh, ctx, into=put(before[1:]))

"""float64 references in numpy, written from the formulas and not from the kernels, and Philox as published."""
import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def linear(x, weight, bias):
    return x @ weight.T + bias


def feed_forward(x, w1, b1, w2, b2):
    return linear(np.maximum(linear(x, w1, b1), 0), w2, b2)


def mlp(images, rows, labels, w1, b1, w2, b2):
    r = np.maximum(images[rows] / 255 @ w1 + b1, 0)
    return linear_cross_entropy(r, w2, b2, labels[rows], -1)


def positions(T, size):
    table = np.empty((T, size))
    for column in range(size):
        angle = np.arange(T) / 10000 ** (column // 2 * 2 / size)
        table[:, column] = np.cos(angle) if column % 2 else np.sin(angle)
    return table


def layer_norm(x, weight, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def batch_norm(x, weight, bias, mean=None, var=None, eps=1e-5):
    mean, var = (x.mean(0), x.var(0)) if mean is None else (mean, var)
    return (x - mean) / np.sqrt(var + eps) * weight + bias


def embedding(weight, ids):
    return weight[ids]


def concat_context(x, context):
    return np.concatenate([x, np.broadcast_to(context, (len(x), *context.shape))], axis=-1)


def cross_entropy(x, labels, ignore, smoothing=0.0):
    valid = labels != ignore
    if not valid.any():
        return np.zeros(1)
    x, labels = x[valid], labels[valid]
    top = x.max(-1, keepdims=True)
    target = (1 - smoothing) * np.eye(x.shape[1])[labels] + smoothing / x.shape[1]
    return np.array([(np.log(np.exp(x - top).sum(-1)) + (target * (top - x)).sum(-1)).mean()])


def linear_cross_entropy(x, weight, bias, labels, ignore, smoothing=0.0):
    return cross_entropy(linear(x.reshape(labels.size, -1), weight, bias), labels.reshape(-1), ignore, smoothing)


def attention_seen(Tq, Tk, lengths, causal):
    """(B, 1, Tq, Tk) bool: which key may each query see?"""
    query, key = np.arange(Tq)[:, None], np.arange(Tk)
    seen = key < lengths[:, None, None, None]
    return np.broadcast_to(seen & (key <= query + Tk - Tq) if causal else seen, (len(lengths), 1, Tq, Tk))


def attention(q, k, v, heads, lengths, causal, keep=1.0):
    """keep (B, heads, Tq, Tk) or 1: what the weights are multiplied with."""
    (Tq, B, D), Tk = q.shape, len(k)
    q, k, v = (x.reshape(len(x), B, heads, D // heads).transpose(1, 2, 0, 3) for x in (q, k, v))
    seen = attention_seen(Tq, Tk, lengths, causal)
    scores = np.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(D // heads), -np.inf)
    top = scores.max(-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - top)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)          # a row that sees nothing: 0
    return (weights * keep @ v).transpose(2, 0, 1, 3).reshape(Tq, B, D)


def attention_keep(B, heads, Tq, Tk, p, step, key):
    """What dropout multiplies the weights with: the elements of (B, heads, Tq, Tk rounded up to a multiple of 4)."""
    Tk4 = -(-Tk // 4) * 4
    kept = dropout_keep(B * heads * Tq * Tk4, p, step, key).reshape(B, heads, Tq, Tk4)[..., :Tk]
    return kept / (1 - np.float64(np.float32(p)))


def gru(x, h0, w_ih, w_hh, b_ih, b_hh, reset_before, lengths=None):
    H = w_hh.shape[1]
    h = np.zeros((x.shape[1], H)) if h0 is None else h0
    out = []
    for x_t in x:
        a, p = x_t @ w_ih.T + b_ih, h @ w_hh.T + b_hh
        r, z = sigmoid(a[:, :H] + p[:, :H]), sigmoid(a[:, H:2*H] + p[:, H:2*H])
        p_n = (r * h) @ w_hh[2*H:].T + b_hh[2*H:] if reset_before else r * p[:, 2*H:]
        n = np.tanh(a[:, 2*H:] + p_n)
        h = (1 - z) * n + z * h
        out.append(h)
    h = np.stack(out)
    return h if lengths is None else h * (np.arange(len(x))[:, None, None] < lengths[:, None])


def philox4x32(counter, key):
    """counter (..., 4) uint32, key two words -> (..., 4) uint32.  Salmon et al. 2011, table 2 and section 3.3."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1 = (np.uint64(k) for k in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(c, -1).astype(np.uint32)


def dropout_keep(n, p, step, key):
    """The mask of pyops_dropout: (n,) bool."""
    groups = np.arange((n + 3) // 4, dtype=np.uint64)
    counter = np.stack([groups & np.uint64(0xFFFFFFFF), groups >> np.uint64(32),
                        np.full_like(groups, step & 0xFFFFFFFF), np.full_like(groups, step >> 32)], -1)
    words = philox4x32(counter.astype(np.uint32), (key & 0xFFFFFFFF, key >> 32))
    return words.reshape(-1)[:n] >= np.uint32(int(float(np.float32(p)) * 2**32))

"""Philox, the counter-based random number generator of dropout, in numpy: for references and image augmentation."""
import numpy as np


def philox4x32(counter, key):
    """Return random words (..., 4) uint32 for counter (..., 4) and a key of two words, all below 2^32.

    Source: Salmon et al. 2011, table 2 and section 3.3.
    """
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k0, k1 = (np.uint64(k) for k in key)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> half) ^ c[1] ^ k0, p1 & low, (p0 >> half) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(c, -1).astype(np.uint32)


def dropout_mask(n, p, step, key):
    """Return a mask (n,) bool of the elements that pyops_dropout keeps."""
    groups = np.arange((n + 3) // 4, dtype=np.uint64)
    counter = np.stack([groups & np.uint64(0xFFFFFFFF), groups >> np.uint64(32),
                        np.full_like(groups, step & 0xFFFFFFFF), np.full_like(groups, step >> 32)], -1)
    words = philox4x32(counter, (key & 0xFFFFFFFF, key >> 32))
    return words.reshape(-1)[:n] >= np.uint32(int(float(np.float32(p)) * 2**32))

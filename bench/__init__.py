"""Measurements.  `python -m bench.train PROGRAM` times training steps, ours and PyTorch's in turn."""
import os

# The threads of numpy's library spin for up to a tenth of a second when their work is done, and take a core from whoever is
# next; with this they sleep at once.  It is read when numpy is loaded.
os.environ.setdefault('OPENBLAS_THREAD_TIMEOUT', '4')

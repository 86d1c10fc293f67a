"""Benchmarks.  `python -m bench.train PROGRAM` times training steps of pyops and PyTorch alternately."""
import os

# After a call, the threads of numpy's BLAS spin for up to 0.1 s and occupy the cores of the next contestant.  With this they
# sleep at once.  It is read when numpy is loaded.
os.environ.setdefault('OPENBLAS_THREAD_TIMEOUT', '4')

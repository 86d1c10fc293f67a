"""Measurements.  `python -m bench.train PROGRAM` times training steps, ours and PyTorch's in turn."""

"""Inspect a training run: save tensors from its plan, measure the error of number formats on them, and plot both."""

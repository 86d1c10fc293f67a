"""Plots for pyops.inspect.draw: their data (numbers.py), their style (style.py), and one module per kind of plot."""

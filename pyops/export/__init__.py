"""Checkpoints of the translators in the formats of other programs: python -m pyops export (docs/export.md).

command.py      the command line
trained.py      a trained model: configuration, weights, tokenizers
graph.py        ONNX graphs, node by node

The module `export` of each program (seq2seq, transformer) knows the layers of its model in each format.
"""

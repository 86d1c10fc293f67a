"""Digits: a 784-30-10 network trained on MNIST (`train`), and a picture of what it got wrong (`report`)."""

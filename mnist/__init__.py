"""Handwritten digits: a 784-30-10 MLP with manual gradients (`train`), a residual network with autograd (`resnet`), and a
picture of the results (`report`)."""

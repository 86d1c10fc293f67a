"""Digits: a 784-30-10 network trained on MNIST with gradients by hand (`train`), a residual network trained on Tensors
(`resnet`), and a picture of what they got wrong (`report`)."""

"""Translation with attention: the encoder and decoder of Vaswani et al. 2017 (`train`), and its answers (`translate`)."""

"""Translation with the transformer of Vaswani et al. 2017: training (`train`) and inference (`translate`)."""

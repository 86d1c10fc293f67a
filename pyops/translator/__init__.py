"""Translation programs independent of the model: flags, settings and training (`program`), inference (`serving`)."""

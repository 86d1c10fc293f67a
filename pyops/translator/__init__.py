"""A translation program without its model: flags, settings and training (`program`), answering (`serving`)."""

"""Look inside a training run: tensors saved from its plan, what narrow number formats do to them, pictures of both."""

"""Data sets: where they lie (`locate`), how they get there (`fetch`), in which order they are read (`batches`)."""

"""Text for translation: corpora, vocabularies, splits, scores, flags, serving."""

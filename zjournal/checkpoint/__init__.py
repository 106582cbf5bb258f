"""A model on disk, without torch: where it lies, what it is, its tokenizer and its chat template."""

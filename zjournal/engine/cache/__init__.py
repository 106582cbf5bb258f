"""The tiers of the KV cache as numbers: which block holds which tokens, and who may have it. No tensors here."""

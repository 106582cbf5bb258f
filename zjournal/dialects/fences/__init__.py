"""Fences: from a request's tools, choice and format to a grammar of what the dialect's parser reads without a fault."""

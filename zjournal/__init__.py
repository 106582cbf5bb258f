"""zjournal: an event-sourced LLM inference server. This file imports nothing, so that kernels load alone."""
